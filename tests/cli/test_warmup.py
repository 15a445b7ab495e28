"""Tests of ``python -m compiled_optim warmup``: the training script loads what the image build compiled."""

from __future__ import annotations

import pytest

from compiled_optim.backends import Availability, for_device
from compiled_optim.cli import main
from tests.helpers import run_python

WARMUP = "from compiled_optim.cli import main; import sys; sys.exit(main(['warmup', *{arguments}]))"

TRAINING = """
import logging, sys, torch, compiled_optim as co
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
for options in ({}, {"max_grad_norm": 1.0}):
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((7,), (50_000,), (3, 5))]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = co.AdamW(params, lr=3e-4, weight_decay=0.1, **options)
    optimizer.step()
    print([unit.source for unit in optimizer.explain().units])
assert "torch._inductor" not in sys.modules
assert "torch._dynamo" not in sys.modules
"""


@pytest.mark.slow
def test_another_process_loads_what_was_warmed_up(tmp_path):
    arguments = ["--optimizer", "adamw", "--dtype", "float32,bfloat16"]
    made = run_python(WARMUP.format(arguments=arguments), TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    for unit in ("AdamW[float32, table]", "AdamW[bfloat16, table]", "squared_norm[float32, table]"):
        assert unit in made
    assert f"kept in {tmp_path.resolve()}" in made
    lines = run_python(TRAINING, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)).splitlines()
    loaded = [line for line in lines if line.startswith("INFO")]
    assert loaded[0] == f"INFO:compiled_optim:loading 1 unit for AdamW on cpu from {tmp_path.resolve()}"
    sources = [eval(line) for line in lines if line.startswith("[")]
    assert sources == [["disk cache"], ["disk cache"] * 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer", "adamx"], "unknown optimizer 'adamx'"),
        (["--optimizer", "sgd", "--dtype", "int8"], "'int8' is not a floating-point dtype"),
        (["--dtype", "float32"], "--optimizer"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(["warmup", *arguments])
    assert message in capsys.readouterr().err


def test_settings_reach_the_optimizer_and_eager_runs_are_told(capsys, monkeypatch):
    for setting, message in (("momentum=-1", "Invalid momentum value: -1"), ("wd=3", "argument 'wd'")):
        assert main(["warmup", "--optimizer", "sgd", "--set", setting]) == 1
        assert message in capsys.readouterr().out
    monkeypatch.setenv("COMPILED_OPTIM_EAGER", "1")
    assert main(["warmup", "--optimizer", "sgd,Lion"]) == 1
    assert "COMPILED_OPTIM_EAGER" in capsys.readouterr().out


def test_a_device_without_a_backend(capsys):
    assert main(["warmup", "--optimizer", "sgd", "--device", "vulkan"]) == 1
    assert "no backend compiles for device type 'vulkan'" in capsys.readouterr().out


def test_a_directory_that_cannot_be_used(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(for_device("cpu"), "_units", {})
    assert main(["warmup", "--optimizer", "sgd"]) == 1
    assert f"Inductor's cache directory {tmp_path / 'file'} cannot be used" in capsys.readouterr().out


def test_devices_where_shapes_are_compiled_in(capsys):
    assert main(["warmup", "--optimizer", "adamw", "--device", "npu"]) == 1
    assert "call its warmup() instead" in capsys.readouterr().out


def test_a_device_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(for_device("cuda"), "available", lambda: Availability(False, "torch sees no CUDA device"))
    assert main(["warmup", "--optimizer", "adamw", "--device", "cuda"]) == 1
    assert "torch sees no CUDA device" in capsys.readouterr().out
