"""Modules, a training loop and queries of an optimizer, shared by the tests of watched modules."""

from __future__ import annotations

import torch
from torch import nn


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(net, *optimizers, steps=1, seed=0):
    torch.manual_seed(seed)
    first = next(net.parameters())
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        net(torch.randn(5, 3).to(first.device, first.dtype)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def held(optimizer):
    return [id(p) for group in optimizer.param_groups for p in group["params"]]


def kinds(error):
    return [change.kind for change in error.value.changes]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))
