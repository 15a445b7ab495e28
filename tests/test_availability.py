"""Availability: each thing that can be missing is named, with a remedy, and nothing raises."""

from __future__ import annotations

import importlib.util
import shutil
from types import ModuleType, SimpleNamespace

import pytest
import torch

from compiled_optim import backends
from compiled_optim.backends import cuda, npu

from .hardware_free.conftest import TORCH_NPU, require
from .helpers import run_python


def test_what_always_works():
    assert backends.get("cpu").available()
    assert backends.get("eager").available()


@pytest.fixture
def everything_for_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/cc")
    monkeypatch.delenv("CC", raising=False)


CUDA = [
    (torch.version, "cuda", None, "this build of torch has no CUDA support; install one that has"),
    (torch.cuda, "is_available", lambda: False, "torch sees no CUDA device; check the driver"),
    (cuda, "find_spec", lambda name: None, "triton is not installed; install the version"),
    (shutil, "which", lambda name: None, "no C compiler was found, which Triton needs; install gcc"),
]


@pytest.mark.parametrize(("owner", "name", "value", "reason"), CUDA, ids=[reason[:25] for *_, reason in CUDA])
def test_what_cuda_can_lack(everything_for_cuda, monkeypatch, owner, name, value, reason):
    assert backends.get("cuda").available()
    monkeypatch.setattr(owner, name, value)
    answer = backends.get("cuda").available()
    assert not answer
    assert answer.reason.startswith(reason)
    assert answer.reason.endswith("pass compile=False to run the same step eagerly on this device")


def test_the_c_compiler_named_by_the_environment_is_looked_for(everything_for_cuda, monkeypatch):
    monkeypatch.setenv("CC", "my-cc")
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "my-cc" else "/usr/bin/cc")
    assert "no C compiler" in backends.get("cuda").available().reason


def imports(**modules):
    """Stand-ins for find_spec and import_module: by name None (not installed), an exception, or fine."""

    def load(name):
        if isinstance(modules[name], Exception):
            raise modules[name]
        return ModuleType(name)

    return lambda name: None if modules[name] is None else object(), SimpleNamespace(import_module=load)


NO_LIBRARY = OSError("libascendcl.so: cannot open shared object file: No such file or directory\nand more")
NPU = [
    ("npu", dict(torch_npu=None), True, "torch_npu is not installed; install the release"),
    ("npu", dict(torch_npu=NO_LIBRARY), True, "the CANN libraries were not found (libascendcl.so: cannot open shared"),
    ("npu", dict(torch_npu=RuntimeError("")), True, "torch_npu cannot be imported (RuntimeError); install the release"),
    ("npu", dict(torch_npu=True), False, "torch_npu sees no NPU; check npu-smi info"),
    (
        "npu",
        dict(torch_npu=True, torchair=ImportError("No module named 'google'")),
        True,
        "torchair cannot be imported",
    ),
    ("npu", dict(torch_npu=True, torchair=True), True, ""),
    ("npu-inductor", dict(torch_npu=True, triton=None), True, "triton is not installed; install triton-ascend"),
    ("npu-inductor", dict(torch_npu=True, triton=True), True, ""),
]


@pytest.mark.parametrize(("name", "modules", "device", "reason"), NPU, ids=[f"{n}-{r[:25]}" for n, *_, r in NPU])
def test_what_the_npu_can_lack(monkeypatch, name, modules, device, reason):
    find, loader = imports(**modules)
    monkeypatch.setattr(npu, "find_spec", find)
    monkeypatch.setattr(npu, "importlib", loader)
    monkeypatch.setattr(npu, "sys", SimpleNamespace(modules={}))
    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: device), raising=False)
    answer = backends.get(name).available()
    assert bool(answer) == (reason == "")
    assert answer.reason.startswith(reason)
    assert not answer.reason or answer.reason.endswith("eagerly on this device")


def test_a_device_that_cannot_be_asked_for_is_none(monkeypatch):
    find, loader = imports(torch_npu=True)
    monkeypatch.setattr(npu, "find_spec", find)
    monkeypatch.setattr(npu, "importlib", loader)
    monkeypatch.delattr(torch, "npu", raising=False)
    assert "sees no NPU" in backends.get("npu").available().reason


def test_the_real_torch_npu_without_cann():
    """The wheel that the Makefile unpacks beside the environment, put on the path after torch was imported."""
    require("torch_npu")
    if importlib.util.find_spec("torch_npu") is not None:
        pytest.skip("torch_npu is installed here")
    code = f"""
import sys, torch
sys.path.insert(0, {str(TORCH_NPU)!r})
from compiled_optim import backends
print(backends.get("npu").available().reason)
"""
    reason = run_python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "the CANN libraries were not found (lib" in reason
    assert "set_env.sh" in reason


UNWRITABLE = """
import torch, compiled_optim as co
param = torch.nn.Parameter(torch.ones(2))
param.grad = torch.ones(2)
optimizer = co.AdamW([param])
try:
    optimizer.step()
except co.BackendUnavailableError as error:
    print(error)
assert param.tolist() == [1, 1] and not optimizer.state
"""


def test_a_cache_directory_that_cannot_be_written_to():
    # in /proc nobody can, not even root
    told = run_python(UNWRITABLE, TORCHINDUCTOR_CACHE_DIR="/proc/sys/kernel")
    assert told.startswith("Inductor's cache directory cannot be used: ")
    assert "set the environment variable TORCHINDUCTOR_CACHE_DIR" in told
