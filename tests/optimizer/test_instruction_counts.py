"""The bytecode instructions for each tensor and group: of the constructor, of the first step, and of one that follows.

Instructions are counted because times depend on what else the machine does. torch.optim compares each group with all
earlier ones; its instructions are subtracted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

import compiled_optim as co


def instructions_of(function: Callable[[], Any]) -> int:
    """Return the number of Python's instructions that a function runs, also in what it calls."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def tensors(count: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]


def one_group(count: int) -> list[dict[str, Any]]:
    return [{"params": tensors(count)}]


def many_groups(count: int) -> list[dict[str, Any]]:
    return [{"params": [param]} for param in tensors(count)]


def assert_linear(instructions: Callable[[int], int]) -> None:
    instructions(1)  # runs what runs once in a process, such as compiling
    assert instructions(200) - instructions(100) <= 1.1 * (instructions(100) - instructions(1))


@pytest.mark.parametrize(("groups_of", "bound"), [(one_group, 200), (many_groups, 700)])
def test_construction(groups_of, bound):
    def added(count: int) -> int:
        """Return the instructions that our constructor runs in addition to those of torch's."""
        ours, theirs = groups_of(count), groups_of(count)
        return instructions_of(lambda: co.AdamW(ours)) - instructions_of(lambda: torch.optim.AdamW(theirs))

    added(1)
    assert added(200) - added(100) <= 100 * bound


@pytest.mark.parametrize("groups_of", [one_group, many_groups])
def test_first_step_of_a_further_optimizer_is_linear(groups_of):
    def instructions(count: int) -> int:
        groups = groups_of(count)
        optimizer = co.AdamW(groups)
        for group in groups:
            for param in group["params"]:
                param.grad = torch.ones(2)
        return instructions_of(optimizer.step)

    assert_linear(instructions)


def test_following_replaced_parameters_is_linear():
    def instructions(count: int) -> int:
        modules = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(count))
        optimizer = co.AdamW(modules)
        for _ in range(2):
            for module in modules:
                module.weight = torch.nn.Parameter(torch.ones(1, 1))
                module.weight.grad = torch.ones(1, 1)
            following = instructions_of(optimizer.step)
        assert all(module.weight.item() < 1 for module in modules)
        return following

    assert_linear(instructions)
