"""Stacks of small matrices: a unit for each size, in one optimizer with large ones, groups and absent gradients."""

from __future__ import annotations

from types import SimpleNamespace

import torch

import compiled_optim as co
from compiled_optim.backends.table_backend import _cut
from compiled_optim.program import Result

SHAPES = ((8, 4, 1, 1), (6, 4, 3, 3), (5, 2, 1, 1), (4, 3, 3, 3), (12, 10), (3, 2, 7, 7), (9,))


def make(cls, **options):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    groups = [{"params": params[:3], "lr": 0.1}, {"params": params[3:], "lr": 0.02}]
    return params, cls(groups, weight_decay=0.1, **options)


def test_each_size_has_a_unit_and_results_are_those_of_torch():
    params, ours = make(co.Adafactor)
    others, theirs = make(torch.optim.Adafactor)
    for step in range(4):
        generator = torch.Generator().manual_seed(step + 1)
        for i, (param, other) in enumerate(zip(params, others, strict=True)):
            grad = torch.randn(param.shape, generator=generator)
            param.grad, other.grad = (grad, grad.clone()) if (i + step) % 3 else (None, None)
        ours.step()
        theirs.step()
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other, rtol=2e-6, atol=2e-6)
    assert "one tensor at a time" not in str(ours.explain())
    units = [unit for unit in str(ours.explain()).splitlines() if unit.startswith("Adafactor[float32, rows, table")]
    assert sorted({unit.split("]")[0].split()[-1] for unit in units}) == ["1×1", "3×3", "table"]


def test_sizes_are_compiled_in_for_small_matrices_and_for_many_of_medium_size():
    shapes = [(3, 4, 4), (20, 7, 7), (2000, 7, 7), (2000, 9, 9), (1, 4, 4)]
    lanes = _cut(SimpleNamespace(shapes=shapes, program=SimpleNamespace(result=Result.NOTHING)))
    assert {str(lane): indices for lane, indices in lanes.items()} == {
        "table 4×4": [0, 4],
        "table": [1, 3],
        "table 7×7": [2],
    }
