"""What the tests share: parameters, gradients that change every step, and comparing two optimizers on them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

SMALL = [(8, 5), (7,), (), (1,), (0, 3), (2, 3, 4), (3, 2, 3, 3)]
TIMEOUT = 3600
"""Seconds after which a process is stuck, and not only on a slow machine."""

LARGE = [(300, 120)]  # above backends.cpu.LARGE: runs in the parallel unit


def parameters(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu"
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # one element alone must stay away from zero: where a sum cancels, relative accuracy means nothing
    values = [torch.randn(shape, generator=generator) + (30 if shape in ((), (1,)) else 0) for shape in shapes]
    return [torch.nn.Parameter(value.to(device, dtype)) for value in values]


def gradients(params: Sequence[Tensor], steps: int, seed: int = 1) -> Iterator[list[Tensor]]:
    """Fresh gradients for each step, rounded to bfloat16 so that every dtype sees the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        values = [torch.randn(p.shape, generator=generator).to(torch.bfloat16) for p in params]
        values = [value.abs() if value.numel() == 1 else value for value in values]  # for the same reason
        yield [
            value.to(p.dtype.to_real() if p.is_complex() else p.dtype).to(p.device, p.dtype)
            for value, p in zip(values, params, strict=True)
        ]


def slow_decay(step: int) -> float:
    """Return the learning rate of a step."""
    return 0.1 / (1 + 0.1 * step)


def train(
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
    params: list[Tensor],
    steps: int = 20,
    schedule: Callable[[int], float] | None = lambda step: 0.1 / (1 + step),
    seed: int = 1,
) -> torch.optim.Optimizer:
    """Step an optimizer with changing gradients and a changing learning rate; the parameters are changed in place."""
    optimizer = make(params)
    for step, grads in enumerate(gradients(params, steps, seed)):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        if schedule is not None:
            for group in optimizer.param_groups:
                group["lr"] = schedule(step)
        optimizer.step()
    return optimizer


def distance(actual: Tensor, expected: Tensor) -> float:
    """Relative difference by norm, in double precision."""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    actual, expected = actual.detach().cpu().to(wide), expected.detach().cpu().to(wide)
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-300)) if expected.numel() else 0.0


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    worst = [distance(a, b) for a, b in zip(actual, expected, strict=True)]
    assert max(worst, default=0.0) <= tolerance, f"relative differences {worst} exceed {tolerance}"


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare two state dicts; tensors have to be equal bit for bit."""
    assert actual["param_groups"] == expected["param_groups"]
    assert actual["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        found = actual["state"][index]
        assert found.keys() == state.keys()
        for name, value in state.items():
            same = torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value
            assert same, f"{name} of parameter {index} differs"


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer, in their order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def copies(params: Sequence[Tensor]) -> list[Tensor]:
    """Parameters with the same values, strides and requires_grad in memory of their own."""
    return [torch.nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in params]


def run_python(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter and return what it printed; a failure shows its stderr."""
    env = {**os.environ, **environment}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT)
    assert result.returncode == 0, result.stderr
    return result.stdout
