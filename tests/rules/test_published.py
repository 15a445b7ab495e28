"""Optimizers against the packages that they are drop-ins for."""

from __future__ import annotations

import copy

import pytest
import torch

import compiled_optim as co
from tests.helpers import assert_close, gradients, parameters

SHAPES = [(8, 5), (7,), (3, 2, 3, 3), (1,)]

SCHEDULE_FREE = [
    ("ScheduleFreeAdamW", "AdamWScheduleFree", {"weight_decay": 0.1, "warmup_steps": 4, "lr": 0.05}),
    ("ScheduleFreeAdamW", "AdamWScheduleFree", {"r": 0.5, "weight_lr_power": 1.0, "betas": (0.8, 0.95)}),
    ("ScheduleFreeSGD", "SGDScheduleFree", {"weight_decay": 0.1, "warmup_steps": 4, "lr": 0.1}),
]


def package(name):
    return pytest.importorskip(name)


def run(optimizer, params, steps, seed=1):
    for step, grads in enumerate(gradients(params, 12, seed)):
        if step in steps:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.clone()  # some packages write to it
            optimizer.step()


@pytest.mark.parametrize(("ours", "theirs", "options"), SCHEDULE_FREE)
def test_schedule_free(ours, theirs, options, compiled):
    """Also after a switch to eval mode and back, in which both write to the parameters."""
    params, twins = parameters(SHAPES, torch.float64), parameters(SHAPES, torch.float64)
    optimizer = getattr(co, ours)(params, **options, compile=compiled)
    reference = getattr(package("schedulefree"), theirs)(twins, **options)
    reference.train()
    for steps in (range(6), range(6, 12)):
        run(optimizer, params, steps)
        run(reference, twins, steps)
        assert_close(params, twins, 1e-12)
        optimizer.eval()
        reference.eval()
        assert_close(params, twins, 1e-12)
        optimizer.train()
        reference.train()
        assert_close(params, twins, 1e-12)
    own, other = optimizer.param_groups[0], reference.param_groups[0]
    assert {key: own[key] for key in other if key != "params"} == {k: v for k, v in other.items() if k != "params"}


@pytest.mark.parametrize("to_package", [True, False])
@pytest.mark.parametrize(("ours", "theirs", "options"), SCHEDULE_FREE)
def test_checkpoints_of_schedule_free(ours, theirs, options, to_package):
    makers = [
        lambda params: getattr(co, ours)(params, **options, compile=False),
        lambda params: getattr(package("schedulefree"), theirs)(params, **options),
    ]
    whole, halves = parameters(SHAPES, torch.float64), parameters(SHAPES, torch.float64)
    truth, first, second = makers[0](whole), makers[not to_package](halves), makers[to_package](halves)
    run(truth, whole, range(12))
    first.train()
    run(first, halves, range(6))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(second, halves, range(6, 12))
    assert_close(halves, whole, 1e-12)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGDP", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
        ("SGDP", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "delta": 5.0, "dampening": 0.1}),
        ("SGDP", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "delta": 1.0}),
        ("AdamP", {"lr": 0.1, "weight_decay": 0.1, "delta": 1.0}),
    ],
)
def test_adamp(name, options):
    params, twins = parameters(SHAPES, torch.float64), parameters(SHAPES, torch.float64)
    optimizer = getattr(co, name)(params, **options, compile=False)
    reference = getattr(package("adamp"), name)(twins, **options)
    run(optimizer, params, range(12))
    run(reference, twins, range(12))
    assert_close(params, twins, 1e-7)  # the cosine and the norm have an epsilon at other places
    (state,) = {*optimizer.state[params[0]]} & {"momentum", "exp_avg"}
    assert_close([optimizer.state[p][state] for p in params], [reference.state[p][state] for p in twins], 1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1, "use_bias_correction": True, "growth_rate": 1.5, "betas": (0.8, 0.95)},
        {"weight_decay": 0.1, "decouple": False, "safeguard_warmup": True, "beta3": 0.9, "d_coef": 2.0},
    ],
)
def test_prodigy(options, compiled):
    """Gradients are those of a quadratic function, so the estimate grows from 1e-6. Two groups share it."""
    params, twins = parameters(SHAPES, torch.float64), parameters(SHAPES, torch.float64)
    groups = [[{"params": each[:2]}, {"params": each[2:]}] for each in (params, twins)]
    optimizer = co.Prodigy(groups[0], **options, compile=compiled)
    reference = package("prodigyopt").Prodigy(groups[1], **options)
    for _ in range(30):
        for param in (*params, *twins):
            param.grad = param.detach() - 3
        optimizer.step()
        reference.step()
    assert_close(params, twins, 1e-9)
    for own, other in zip(optimizer.param_groups, reference.param_groups, strict=True):
        assert own["d"] == pytest.approx(other["d"], rel=1e-9)
        assert own["d"] > 1e-3
        assert own["k"] == other["k"] == 30


def test_prodigy_without_gradients():
    """Without any gradient nothing happens, as in torch.optim; the next step is the first one."""
    params, twins = parameters(SHAPES, torch.float64), parameters(SHAPES, torch.float64)
    optimizer, reference = co.Prodigy(params, compile=False), co.Prodigy(twins, compile=False)
    optimizer.step()
    assert_close(params, twins, 0)
    run(optimizer, params, range(2))
    run(reference, twins, range(2))
    assert_close(params, twins, 0)


@pytest.mark.parametrize("decouple", [True, False])
def test_prodigy_with_zero_gradients(decouple, compiled):
    """Without any gradient different from zero, the package returns before the update, and so without weight decay."""
    params, twins = parameters(SHAPES, torch.float64), parameters(SHAPES, torch.float64)
    options = {"weight_decay": 0.1, "d0": 0.1, "decouple": decouple}
    optimizer = co.Prodigy(params, **options, compile=compiled)
    reference = package("prodigyopt").Prodigy(twins, **options)
    for own, given in ((optimizer, params), (reference, twins)):
        for param in given:
            param.grad = torch.zeros_like(param)
        own.step()
        run(own, given, range(3))
    assert_close(params, twins, 1e-12)
