"""States that come from another storage: loaded from a checkpoint, or kept before an option of the group changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import compiled_optim as co


def made(optimizer: str = "AdamW", shape: tuple[int, ...] = (64, 64), dtype=torch.float32, **options: Any):
    """Return an eager optimizer and its only parameter."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    param = torch.nn.Parameter(values.to(dtype))
    return getattr(co, optimizer)([param], lr=1e-2, compile=False, **options), param


def step(optimizer: co.Optimizer, param: torch.Tensor, seed: int = 1) -> None:
    param.grad = 0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)).to(param.dtype)
    optimizer.step()


def saved(*args: Any, **options: Any) -> dict[str, Any]:
    """Return a checkpoint after one step."""
    optimizer, param = made(*args, **options)
    step(optimizer, param)
    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("layout", ["tensors", "flat"])
def test_codes_of_a_checkpoint_are_decoded(layout):
    checkpoint = saved(state_dtype="8bit")
    optimizer, param = made(layout=layout)
    optimizer.load_state_dict(checkpoint)
    step(optimizer, param, 2)
    exact, twin = made()
    for seed in (1, 2):
        step(exact, twin, seed)
    assert optimizer.state[param].keys() == {"step", "exp_avg", "exp_avg_sq"}
    for name in ("exp_avg", "exp_avg_sq"):
        expected = exact.state[twin][name]
        assert (optimizer.state[param][name] - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("layout", ["tensors", "flat"])
@pytest.mark.parametrize("other", [{"rounding": "kahan"}, {}], ids=["kahan", "none"])
def test_companions_of_another_storage_are_dropped(layout, other):
    checkpoint = saved(dtype=torch.bfloat16, master_weights=True)
    optimizer, param = made(dtype=torch.bfloat16, layout=layout, **other)
    optimizer.load_state_dict(checkpoint)
    assert "master" in optimizer.state[param]
    step(optimizer, param, 2)
    assert "master" not in optimizer.state[param]
    assert ("compensation" in optimizer.state[param]) is bool(other)
