"""``in_backward=True``: parameters and gradients that change between iterations. The reference is torch.optim."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import compiled_optim as co
from compiled_optim.backward import BackwardSteps


def weight_of(net):
    return net[2].weight


CHANGES = {
    "memory": lambda net: setattr(weight_of(net), "data", weight_of(net).data.clone()),
    "strides": lambda net: setattr(weight_of(net), "data", weight_of(net).data.t().contiguous().t()),
    "strides of a gradient": lambda net: setattr(weight_of(net), "grad", torch.zeros(4, 6).t()),
    "gradients": lambda net: net[1].requires_grad_(True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_iterations(change, compiled, monkeypatch):
    """Every parameter is a part of its own, whose check is kept from the first iterations on."""
    collect = BackwardSteps.collect

    def collect_one(self, param):
        self._limit = 1
        collect(self, param)

    monkeypatch.setattr(BackwardSteps, "collect", collect_one)
    nets = []
    for make in (torch.optim.AdamW, co.AdamW):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 6))
        net[1].requires_grad_(False)
        options = {} if make is torch.optim.AdamW else {"in_backward": True, "compile": compiled}
        optimizer = make(net.parameters(), lr=0.1, **options)
        for step in range(8):
            if step == 4:
                CHANGES[change](net)
            torch.manual_seed(step)
            net(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        nets.append(net)
    for param, expected in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=0, atol=2e-6)
