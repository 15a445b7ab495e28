"""Tests of ``python -m compiled_optim doctor``."""

from __future__ import annotations

import re

import pytest

from compiled_optim.backends import registry
from compiled_optim.backends.eager import EagerBackend
from compiled_optim.cli import main
from tests.helpers import run_python


def test_doctor_where_compiling_works(capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("COMPILED_OPTIM_EAGER", "1")  # changes how optimizers run, not what can be compiled
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line.split("  ")[0].strip(): line for line in lines if line.strip()}
    assert "compiles; the first step took" in found["cpu"]
    assert re.search("this build of torch has no CUDA support|torch sees no CUDA device|compiles", found["cuda"])
    assert "available; compiles nothing" in found["eager"]
    assert {"torch", "C++ compiler", "vector ISA", "cache directory", "units kept there"} <= set(found)
    assert {"OMP_NUM_THREADS", "COMPILED_OPTIM_EAGER"} <= set(found)


@pytest.mark.parametrize(
    ("compiler", "answer"),
    [("no-such-compiler", "not available: no C++ compiler was found"), ("false", "does not compile: the C++ compiler")],
)
def test_doctor_where_compiling_fails(compiler, answer, tmp_path):
    code = "from compiled_optim.cli import main; print('exit code', main(['doctor']))"
    output = run_python(code, CXX=compiler, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert answer in output
    assert "exit code 1" in output


def test_a_backend_that_computes_something_else_is_found_out(capsys, monkeypatch):
    class Wrong(EagerBackend):
        name = "wrong"
        devices = ("cpu",)
        compiles = True

        def cut(self, shapes):
            return []

    monkeypatch.setattr(registry, "_backends", {"wrong": Wrong()})
    assert main(["doctor"]) == 1
    assert "compiles, but a step from 1 by 0.5 leads to [1.0, 1.0, 1.0]" in " ".join(capsys.readouterr().out.split())


def test_a_command_is_required(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "doctor" in capsys.readouterr().err
