"""Tests of availability: each missing requirement is named with a remedy, and nothing raises."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from compiled_optim import backends
from tests.hardware_free.conftest import TORCH_NPU, require
from tests.helpers import run_python


def test_cpu_and_eager_are_always_available():
    assert backends.get("cpu").available()
    assert backends.get("eager").available()


@dataclass(frozen=True)
class Environment:
    """The software and devices of a machine. The default has everything that any backend needs.

    ``modules`` maps the modules that can be imported to their source, ``programs`` are the executables on PATH, and
    ``variables`` are set in the environment. ``npu`` is the result of ``torch.npu.is_available()``, or None if
    torch_npu has not added ``torch.npu``.
    """

    modules: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(("triton", "torch_npu", "torchair"), ""))
    programs: tuple[str, ...] = ("gcc",)
    variables: Mapping[str, str] = field(default_factory=dict)
    cuda_version: str | None = "12.6"
    cuda: bool = True
    npu: bool | None = True

    def without(self, module: str) -> Environment:
        return replace(self, modules={name: source for name, source in self.modules.items() if name != module})

    def failing(self, module: str, error: str) -> Environment:
        return replace(self, modules={**self.modules, module: f"raise {error}"})


@pytest.fixture
def enter(tmp_path, monkeypatch) -> Callable[[Environment], None]:
    """Patch this process so that it detects the given environment until the end of the test."""

    def enter(environment: Environment) -> None:
        for module, source in environment.modules.items():
            (tmp_path / f"{module}.py").write_text(source)
        for program in environment.programs:
            (tmp_path / program).touch(mode=0o755)
        for module in ("triton", "torch_npu", "torchair"):
            sys.modules.pop(module, None)
        monkeypatch.setattr(sys, "path", [str(tmp_path), sysconfig.get_path("stdlib")])
        for variable, value in {"CC": "", "PATH": str(tmp_path), **environment.variables}.items():
            monkeypatch.setenv(variable, value)
        npu = None if environment.npu is None else SimpleNamespace(is_available=lambda: environment.npu)
        faked: list[tuple[Any, str, Any]] = [
            (torch.version, "cuda", environment.cuda_version),
            (torch.cuda, "is_available", lambda: environment.cuda),
            (torch, "npu", npu),
        ]
        for owner, name, value in faked:
            monkeypatch.setattr(owner, name, value, raising=False)

    with mock.patch.dict(sys.modules):
        yield enter


ALL = Environment()
NO_TEXT = "RuntimeError"
NO_CANN = r'OSError("libascendcl.so: cannot open shared object file: No such file or directory\nand more")'
CASES = [
    ("cuda", ALL, ""),
    ("cuda", replace(ALL, cuda_version=None), "this build of torch has no CUDA support; install one that has"),
    ("cuda", replace(ALL, cuda=False), "torch sees no CUDA device; check the driver"),
    ("cuda", ALL.without("triton"), "triton is not installed; install the version"),
    ("cuda", replace(ALL, programs=()), "no C compiler was found, which Triton needs; install gcc"),
    ("cuda", replace(ALL, variables={"CC": "my-cc"}), "no C compiler was found"),
    ("cuda", replace(ALL, variables={"CC": "my-cc"}, programs=("my-cc",)), ""),
    ("npu", ALL, ""),
    ("npu", ALL.without("torch_npu"), "torch_npu is not installed; install the release"),
    ("npu", ALL.failing("torch_npu", NO_CANN), "the CANN libraries were not found (libascendcl.so: cannot open shared"),
    ("npu", ALL.failing("torch_npu", NO_TEXT), "torch_npu cannot be imported (RuntimeError); install the release"),
    ("npu", replace(ALL, npu=False), "torch_npu sees no NPU; check npu-smi info"),
    ("npu", replace(ALL, npu=None), "torch_npu sees no NPU; check npu-smi info"),
    ("npu", ALL.failing("torchair", 'ImportError("No module named google")'), "torchair cannot be imported (No module"),
    ("npu", ALL.without("triton"), ""),
    ("npu-inductor", ALL, ""),
    ("npu-inductor", ALL.without("triton"), "triton is not installed; install triton-ascend"),
]


@pytest.mark.parametrize(
    ("name", "environment", "reason"), CASES, ids=[f"{name}-{reason[:30] or 'available'}" for name, _, reason in CASES]
)
def test_what_is_missing_is_named(enter, name, environment, reason):
    enter(environment)
    answer = backends.get(name).available()
    assert bool(answer) == (reason == "")
    assert answer.reason.startswith(reason)
    assert not reason or answer.reason.endswith("pass compile=False to run the same step eagerly on this device")


def test_the_real_torch_npu_without_cann():
    """Use the wheel that the Makefile unpacks. It is added to sys.path after torch is imported."""
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
