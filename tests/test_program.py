"""Tests of ``program``: which rules may be stepped shard by shard without an all_reduce."""

from __future__ import annotations

import pytest
import torch

import compiled_optim as co
from catalog import CATALOG
from compiled_optim.program_checks import is_elementwise


class MixesElements(co.Optimizer):
    """A rule that combines the elements of a tensor without all_reduce."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1}, compile=False)

    @staticmethod
    def update(params, grads, *, lr):
        for param, grad in zip(params, grads, strict=True):
            param.sub_(lr * grad / grad.norm())


class IsAlwaysNaN(MixesElements):
    """A rule of which an example shows nothing, because all its results are NaN."""

    @staticmethod
    def update(params, grads, *, lr):
        for param, grad in zip(params, grads, strict=True):
            param.sub_(lr * (-grad.abs().sum() - 1).sqrt())


def program_of(optimizer):
    return optimizer.program(optimizer.param_groups[0], False)


@pytest.mark.parametrize(
    ("name", "options"), [(entry.name, options) for entry in CATALOG.values() for options in entry.parity]
)
def test_rules_without_sums_are_elementwise(name, options):
    """Centred RMSprop has the root of a negative number in an example with random states."""
    optimizer = getattr(co, name)([torch.nn.Parameter(torch.ones(3))], compile=False, **options)
    program = program_of(optimizer)
    assert program.reduces or is_elementwise(program, 1 + optimizer.rowwise)


@pytest.mark.parametrize("rule", [MixesElements, IsAlwaysNaN])
def test_rules_that_combine_elements_are_not(rule):
    assert not is_elementwise(program_of(rule([torch.nn.Parameter(torch.ones(3))])), 1)
