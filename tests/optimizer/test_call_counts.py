"""The number of function calls for each tensor and group, in the constructor and in the first step.

Calls are counted because times depend on what else the machine does. torch.optim compares each group with all earlier
ones; its calls are subtracted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import compiled_optim as co


def calls_of(function: Callable[[], Any]) -> int:
    """Return the number of functions that a function calls, in Python and in C."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def tensors(count: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]


def one_group(count: int) -> list[dict[str, Any]]:
    return [{"params": tensors(count)}]


def many_groups(count: int) -> list[dict[str, Any]]:
    return [{"params": [param]} for param in tensors(count)]


@pytest.mark.parametrize(("groups_of", "bound"), [(one_group, 20), (many_groups, 60)])
def test_construction(groups_of, bound):
    def added(count: int) -> int:
        """Return the calls that our constructor makes in addition to torch's."""
        ours, theirs = groups_of(count), groups_of(count)
        return calls_of(lambda: co.AdamW(ours)) - calls_of(lambda: torch.optim.AdamW(theirs))

    added(1)  # what is made once in a process
    assert added(400) - added(200) <= 200 * bound


@pytest.mark.parametrize("groups_of", [one_group, many_groups])
def test_first_step_of_a_further_optimizer_is_linear(groups_of):
    def calls(count: int) -> int:
        groups = groups_of(count)
        optimizer = co.AdamW(groups)
        for group in groups:
            for param in group["params"]:
                param.grad = torch.ones(2)
        return calls_of(optimizer.step)

    calls(1)  # compiles the unit
    assert calls(400) - calls(200) <= 1.1 * (calls(200) - calls(1))
