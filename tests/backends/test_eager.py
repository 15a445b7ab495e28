"""Tests of the eager backend: on the CPU it processes tensors in pieces, with the results of the references."""

from __future__ import annotations

import pytest
import torch

import compiled_optim as co
from catalog import CATALOG
from compiled_optim.backends import eager
from tests.helpers import assert_close, parameters, train

SHAPES = [(), (5,), (300,), (6, 70), (129,)]


@pytest.mark.parametrize("name", CATALOG)
def test_pieces_of_tensors_give_the_results_of_whole_tensors(name, monkeypatch):
    """Tensors of more than 100 elements are split, also if the rule sums over them."""
    monkeypatch.setattr(eager, "MAX_PIECE", 64)
    monkeypatch.setattr(eager, "MAX_WHOLE", 100)
    entry = CATALOG[name]
    ours, theirs = parameters(SHAPES, torch.float64), parameters(SHAPES, torch.float64)
    train(lambda p: getattr(co, name)(p, **entry.typical, compile=False), ours, 5)
    train(lambda p: entry.reference(p, **entry.typical), theirs, 5)
    assert_close(ours, theirs, entry.tolerance[0])


def test_tensors_are_cut_only_where_the_rule_allows_it():
    assert eager.cut_to_cache([(3,), (4,), (2, 3)], max_whole=10) == [eager.Piece([0, 1, 2], [None] * 3)]
    size = eager.MAX_PIECE + 1
    whole, cut = eager.cut_to_cache([(3,), (size,)], max_whole=size - 1)[0], eager.cut_to_cache([(size,)], size - 1)
    assert whole == eager.Piece([0], [None])
    assert cut == [eager.Piece([0], [slice(0, size - 1)]), eager.Piece([0], [slice(size - 1, 2 * (size - 1))])]
    assert eager.cut_to_cache([(size,)], max_whole=size) == [eager.Piece([0], [None])]


def test_a_users_rule_sees_whole_tensors(monkeypatch):
    """A user's rule may sum over a tensor without declaring it."""
    monkeypatch.setattr(eager, "MAX_PIECE", 4)
    sizes = []

    class Normalised(co.Optimizer):
        @staticmethod
        def update(p, g, *, lr):
            sizes.extend(len(tensor) for tensor in p)
            for param, grad in zip(p, g, strict=True):
                param.sub_(lr * grad / grad.norm())

    weight = torch.nn.Parameter(torch.zeros(9))
    weight.grad = torch.ones(9)
    Normalised([weight], {"lr": 3.0}, compile=False).step()
    assert sizes == [9]
    torch.testing.assert_close(weight.detach(), torch.full((9,), -1.0))
