"""The CPU backend steps all parameters that share formula, dtypes and device in one call."""

from __future__ import annotations

import pytest
import torch

import compiled_optim as co
from tests.helpers import parameters

DIFFERENT = [{"lr": 0.1 / (i + 1), "weight_decay": 0.01 * (i + 1), "betas": (0.8, 0.9 + 0.01 * i)} for i in range(7)]

# the shapes of the parameters, the options of the groups they are dealt to, the indices of those without a gradient in
# each of the first steps, and the number of different step counts after them
CASES = {
    "one tensor": ([(5,)], [{}], [], 1),
    "one large tensor": ([(300_000,)], [{}], [], 1),
    "tensors of all sizes": ([(n,) for n in (1, 5, 1_000, 40_000, 70_000)] * 4, [{}], [], 1),
    "a hundred tensors": ([(n, 3) for n in range(1, 101)], [{}], [], 1),
    "tensors of all ranks": ([(), (3,), (3, 2), (3, 2, 4), (0, 3)], [{}], [], 1),
    "groups": ([(n,) for n in range(1, 22)], DIFFERENT, [], 1),
    "step counts": ([(n,) for n in range(1, 11)], [{}], [range(5, 10), range(3), range(1, 7)], 2),
    "groups and step counts": ([(n,) for n in (1, 50_000, 20, 70_000) * 5], DIFFERENT, [range(9), range(4, 15)], 3),
}


@pytest.mark.parametrize("case", CASES)
def test_calls_do_not_depend_on_tensors_groups_or_step_counts(case):
    shapes, options, absent, counts = CASES[case]
    params = parameters(shapes)
    optimizer = co.AdamW([{"params": params[i :: len(options)], **own} for i, own in enumerate(options)])
    for without in [*absent, ()]:
        for i, param in enumerate(params):
            param.grad = None if i in without else torch.ones_like(param)
        optimizer.step()
    assert len({float(optimizer.state[param]["step"]) for param in params}) == counts
    assert optimizer.explain().calls_per_step == 1


def test_each_combination_of_dtypes_has_its_call():
    params = [p for dtype in (torch.float32, torch.float64, torch.bfloat16) for p in parameters([(5,), (40,)], dtype)]
    optimizer = co.AdamW(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.explain().calls_per_step == 3
