"""Every optimizer of the catalog against torch.optim or the formula of its paper, with every option it has.

Each case takes 20 steps with changing gradients and a changing learning rate.
"""

from __future__ import annotations

import pytest
import torch

import compiled_optim as co
from catalog import ALL, CATALOG
from tests.helpers import LARGE, SMALL, assert_close, distance, parameters, slow_decay, train

CASES = [(name, options) for name, entry in CATALOG.items() for options in entry.parity]
IDS = ["-".join([name, *(f"{k}={v}" for k, v in options.items())]) for name, options in CASES]
LOW_PRECISION = [i for i, (name, options) in enumerate(CASES) if CATALOG[name].fused and "maximize" not in options]

SEED = 17
"""With this seed, Lion never takes the sign of a sum that would be zero without rounding."""


def states_of(optimizer):
    return [
        value
        for param in optimizer.param_groups[0]["params"]
        for name, value in sorted(optimizer.state[param].items())
        if isinstance(value, torch.Tensor)
    ]


def test_the_catalog_has_every_optimizer():
    exported = [getattr(co, name) for name in co.__all__]
    optimizers = [thing for thing in exported if isinstance(thing, type) and issubclass(thing, co.Optimizer)]
    assert ALL.keys() == {optimizer.__name__ for optimizer in optimizers} - {"Optimizer"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_agrees_with_the_reference(name, options, dtype, compiled, device):
    entry = CATALOG[name]
    tolerance = dict(zip((torch.float64, torch.float32), entry.tolerance, strict=True))[dtype]
    shapes = SMALL + LARGE if dtype == torch.float32 else SMALL
    shapes = [shape for shape in shapes if entry.steps_empty or 0 not in shape]
    ours, theirs = parameters(shapes, dtype, device=device), parameters(shapes, dtype, device=device)
    loop = {"foreach": False} if entry.in_torch else {}
    optimizer = train(lambda p: getattr(co, name)(p, **options, compile=compiled), ours, schedule=slow_decay, seed=SEED)
    reference = train(lambda p: entry.reference(p, **options, **loop), theirs, schedule=slow_decay, seed=SEED)
    assert_close(ours, theirs, tolerance)
    if entry.in_torch:
        assert_close(states_of(optimizer), states_of(reference), tolerance)
    moved = [distance(p, q) for p, q in zip(ours, parameters(shapes, dtype), strict=True) if p.numel()]
    assert min(moved) > 1e-6, "the test must move every parameter"


@pytest.mark.parametrize("name", CATALOG)
def test_groups_of_mixed_dtypes(name, compiled, device):
    """float32, float16 and bfloat16 in one group, compared with a run in float64."""
    entry = CATALOG[name]
    options = {**entry.float16, **entry.without_norm}  # one norm for each dtype; the reference has one dtype
    tolerance = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
    ours = [p for dtype in tolerance for p in parameters([(6, 7), (5,), (4, 3, 2, 2)], dtype, device=device)]
    theirs = [torch.nn.Parameter(p.detach().cpu().double()) for p in ours]
    train(lambda p: getattr(co, name)(p, **options, compile=compiled), ours, 10, slow_decay)
    train(lambda p: entry.reference(p, **options), theirs, 10, slow_decay)
    for param, truth in zip(ours, theirs, strict=True):
        assert distance(param, truth) <= tolerance[param.dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "options"), [CASES[i] for i in LOW_PRECISION], ids=[IDS[i] for i in LOW_PRECISION])
def test_low_precision_is_as_accurate_as_in_torch(name, options, dtype, compiled, device):
    """Compared with the same run in float64, from the same rounded parameters and gradients."""
    options = {**options, **CATALOG[name].float16}
    shapes = [(50, 100), (3000,)]  # enough elements to compare rounding errors on average

    def run(make, run_dtype):
        start = [p.detach().to(dtype).to(device, run_dtype) for p in parameters(shapes)]
        params = [torch.nn.Parameter(value) for value in start]
        train(make, params)
        return params

    truth = run(lambda p: getattr(torch.optim, name)(p, **options), torch.float64)
    theirs = run(lambda p: getattr(torch.optim, name)(p, **options, foreach=True), dtype)
    ours = run(lambda p: getattr(co, name)(p, **options, compile=compiled), dtype)
    for our, their, true in zip(ours, theirs, truth, strict=True):
        # 2 % tolerance: if torch also rounds only once, the two errors differ by chance
        assert distance(our, true) <= 1.02 * distance(their, true)
