"""Following n changed parameters takes a number of operations, and of copies of lists, that is linear in n."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import compiled_optim as co

PACKAGE = str(Path(co.__file__).parent)


class CountingGroup(dict):
    """A parameter group that counts the items of all lists that are assigned to it."""

    items_written = 0

    def __setitem__(self, key, value):
        self.items_written += len(value)
        super().__setitem__(key, value)

    def update(self, *args, **kwargs):
        raise AssertionError("this would not be counted")


def replaced(net):
    for layer in net:
        layer.weight = nn.Parameter(torch.zeros(1, 1))


def removed(net):
    for layer in net[:-1]:
        layer.weight = None


def renamed(net):
    net.insert(0, nn.Identity())


def added(net):
    net.extend([nn.Linear(1, 1, bias=False) for _ in range(len(net))])


def moved(net):
    for layer in net:
        layer.weight.data = layer.weight.data.clone()


def parametrized(net):
    for layer in net:
        parametrize.register_parametrization(layer, "weight", nn.Identity())


def weight_normed(net):
    for layer in net:
        nn.utils.parametrizations.weight_norm(layer)


def set_again(net):
    for layer in net:
        layer.bias = nn.Parameter(torch.zeros(1))


def lines_of(call: Callable[[], object]) -> int:
    """Return the number of lines of the package that a call runs."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def work(change, size) -> tuple[int, int]:
    """Return how many lines run, and how many items of lists are written, to follow a change of all parameters."""
    net = nn.ModuleList(nn.Linear(1, 1, bias=change is set_again) for _ in range(size))
    optimizer = co.SGD(net, compile=False)
    if change is set_again:
        for layer in net:
            layer.bias = None
        optimizer.step()
    change(net)
    group = optimizer.param_groups[0] = CountingGroup(optimizer.param_groups[0])
    # without a gradient, the step makes an empty plan
    lines = lines_of(optimizer.step)
    return lines, group.items_written


@pytest.mark.parametrize(
    "change",
    [replaced, removed, renamed, added, moved, parametrized, weight_normed, set_again],
    ids=lambda f: f.__name__,
)
def test_the_work_is_linear(change):
    work(change, 4)  # fills caches
    small, large = work(change, 50), work(change, 100)
    assert large[0] < 2.1 * small[0]
    assert large[1] <= 2 * 2 * 2 * 100  # two lists, up to two parameters in place of one, written at most twice


def test_names_are_linear():
    def lines(size):
        net = nn.ModuleList(nn.Linear(1, 1) for _ in range(size))
        optimizer = co.SGD(net.parameters(), compile=False)
        optimizer.watch(net)
        return lines_of(lambda: optimizer._stepper.tracker.names(optimizer.param_groups))

    assert lines(100) < 2.1 * lines(50)
