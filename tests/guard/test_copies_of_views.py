"""Copies of an optimizer whose parameters are views with gaps, which deepcopy makes dense."""

from __future__ import annotations

import copy

import pytest
import torch

import compiled_optim as co
from tests.helpers import assert_close


class Net(torch.nn.Module):
    """A module with every second column of a matrix as its parameter."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(24.0).view(4, 6)[:, ::2])


def stepped(net, optimizer, value):
    net.weight.grad = torch.full_like(net.weight, value)
    optimizer.step()


@pytest.mark.parametrize("watched", [False, True], ids=["parameters", "module"])
@pytest.mark.parametrize("before", [0, 2], ids=["before the first step", "after two steps"])
def test_a_copy_is_no_reallocation(before, watched, compiled):
    results = []
    for cls, options in ((co.AdamW, {"on_realloc": "raise", "compile": compiled}), (torch.optim.AdamW, {})):
        net = Net()
        params = net if watched and cls is co.AdamW else net.parameters()
        optimizer = cls(params, lr=0.1, **options)
        for _ in range(before):
            stepped(net, optimizer, 1.0)
        copied_net, copied = copy.deepcopy((net, optimizer))
        assert copied_net.weight.stride() != net.weight.stride()
        stepped(copied_net, copied, 2.0)
        stepped(net, optimizer, 3.0)
        results.append([net.weight, copied_net.weight])
        if cls is co.AdamW:
            assert copied.explain().events == optimizer.explain().events == ()
    assert_close(*results, 2e-6)
