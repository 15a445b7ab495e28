"""Parameters that share memory are updated in torch's order, whatever their step counts and groups are."""

from __future__ import annotations

import random

import pytest
import torch

import compiled_optim as co
from tests.helpers import assert_close

ALL = (0, 1, 2, 3)


def at_random(seed):
    choose = random.Random(seed)
    return [[i for i in ALL if choose.random() < 0.5] for _ in range(6)]


# the parameters that have a gradient, step by step, as a function of the seed
SUBSETS = {
    "equal counts": lambda seed: [ALL, ALL, ALL],
    "one is ahead": lambda seed: [(2,), ALL],
    "every count is another": lambda seed: [(0,), (0, 3), (0, 3, 2), ALL, ALL],
    "at random": at_random,
}


def overlapping(seed, unit):
    a, b = torch.randn(2, 3 * unit, generator=torch.Generator().manual_seed(seed)).clone().unbind()
    return [torch.nn.Parameter(part) for part in (a[: 2 * unit], a[unit:], b[: 2 * unit], b[unit:])]


def in_two_groups(params):
    """Return groups in which the parameters have the order 3, 1, 2, 0."""
    return [{"params": params[::-2], "lr": 0.3}, {"params": params[-2::-2]}]


@pytest.mark.parametrize(("unit", "seeds"), [(3, 30), (12_000, 2)], ids=["short", "long"])
@pytest.mark.parametrize("groups", [list, in_two_groups], ids=["one group", "groups"])
@pytest.mark.parametrize("subsets", SUBSETS)
def test_parameters_are_updated_in_order(subsets, groups, unit, seeds, compiled):
    for seed in range(seeds):
        results = []
        for make, options in ((co.AdamW, {"compile": compiled}), (torch.optim.AdamW, {"foreach": False})):
            params = overlapping(seed, unit)
            optimizer = make(groups(params), lr=0.1, **options)
            generator = torch.Generator().manual_seed(seed + 100)
            for subset in SUBSETS[subsets](seed):
                for i, param in enumerate(params):
                    grad = torch.randn(param.shape, generator=generator)
                    param.grad = grad if i in subset else None
                optimizer.step()
            results.append(params)
        assert_close(*results, 5e-6)
