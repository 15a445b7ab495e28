"""Another random subset of the parameters has a gradient in each of 200 steps.

A parameter without gradient keeps its values, its states and its step count, as in torch.optim.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import compiled_optim as co
from catalog import CATALOG
from compiled_optim.engine.bound import TensorBucket
from tests.helpers import SMALL, assert_close, copies, gradients, parameters

from .formulas import FormulaOfEach

STEPS = 200
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
FORMULA_TOLERANCE = {torch.float64: 1e-11, torch.float32: 5e-6}

# name, options of all groups, and the options of each of three groups
IN_TORCH = {
    "AdamW": ("AdamW", {}, ({"lr": 1e-2}, {"lr": 3e-3, "betas": (0.8, 0.99)}, {"weight_decay": 0.2, "eps": 1e-3})),
    "AdamW amsgrad": ("AdamW", {"amsgrad": True}, ({"lr": 1e-2}, {"lr": 3e-3}, {"betas": (0.5, 0.9)})),
    "Adam amsgrad": ("Adam", {"amsgrad": True, "weight_decay": 0.1}, ({"lr": 1e-2}, {"lr": 3e-3}, {"eps": 1e-3})),
    "Adam, decay in some groups": ("Adam", {}, ({"weight_decay": 0.1}, {"lr": 3e-3}, {"weight_decay": 0.2})),
    "Adam, maximize in one group": ("Adam", {"lr": 1e-3}, ({}, {"maximize": True}, {"lr": 3e-3})),
    "SGD dampening": (
        "SGD",
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        ({"lr": 1e-2}, {"lr": 3e-3, "momentum": 0.5}, {"lr": 1e-3, "dampening": 0.6}),
    ),
    "SGD nesterov": (
        "SGD",
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        ({"lr": 1e-2}, {"lr": 3e-3, "momentum": 0.5}, {"lr": 1e-3, "weight_decay": 0.2}),
    ),
    "SGD, momentum in some groups": ("SGD", {"lr": 1e-2}, ({"momentum": 0.9}, {}, {"momentum": 0.5, "lr": 1e-3})),
    "RMSprop": (
        "RMSprop",
        {"momentum": 0.9, "centered": True, "eps": 1e-2, "weight_decay": 0.1},
        ({"lr": 1e-3}, {"lr": 3e-4, "alpha": 0.9}, {"lr": 1e-4, "momentum": 0.5}),
    ),
    "Adadelta": ("Adadelta", {}, ({"lr": 1.0}, {"lr": 0.3, "rho": 0.8}, {"eps": 1e-3})),
}
FORMULAS = {
    "Lamb": ({"weight_decay": 0.1}, ({"lr": 1e-2}, {"lr": 3e-3, "betas": (0.8, 0.99)}, {"lr": 1e-3, "eps": 1e-3})),
    "AdamP": (
        {"weight_decay": 0.01, "delta": 0.9},
        ({"lr": 1e-2}, {"lr": 3e-3, "betas": (0.8, 0.99)}, {"lr": 1e-3, "wd_ratio": 0.5}),
    ),
    "Lion": ({"weight_decay": 0.01}, ({"lr": 1e-2}, {"lr": 3e-3, "betas": (0.8, 0.95)}, {"lr": 1e-3})),
    "Adan": ({"weight_decay": 0.01}, ({"lr": 1e-2}, {"lr": 3e-3, "betas": (0.9, 0.7, 0.8)}, {"lr": 1e-3})),
    "BertAdam": (
        {"warmup": 0.1, "t_total": 2 * STEPS},
        ({"lr": 1e-2, "max_grad_norm": 0.5}, {"lr": 3e-3, "max_grad_norm": -1}, {"max_grad_norm": 2.0, "b1": 0.8}),
    ),
    "RMSpropTF": (
        {"momentum": 0.9, "centered": True, "eps": 1e-3},
        ({"lr": 1e-3}, {"lr": 3e-4, "alpha": 0.8}, {"lr": 1e-4, "momentum": 0.5}),
    ),
}


def in_groups(params, own):
    """Deal the parameters to the groups by turns."""
    return [{"params": params[i :: len(own)], **options} for i, options in enumerate(own)]


class Run:
    """One of our optimizers beside references that get the same gradients and learning rates."""

    def __init__(self, optimizer, params):
        self.optimizer, self.params = optimizer, params
        self.references, self.schedulers = [], [self.scheduler(optimizer)]
        self.gradients = gradients(params, STEPS, seed=3)
        self.choose = random.Random(4)

    @staticmethod
    def scheduler(optimizer, last=-1):
        return LambdaLR(optimizer, lambda step: 0.999**step, last)

    def add(self, reference, params, last=-1):
        self.references.append((reference, params))
        self.schedulers.append(self.scheduler(reference, last))

    def steps(self, count):
        for _ in range(count):
            likely = self.choose.choice((0, 0.1, 0.5, 0.9, 1))
            grads = [grad if self.choose.random() < likely else None for grad in next(self.gradients)]
            for optimizer, params in [(self.optimizer, self.params), *self.references]:
                for param, grad in zip(params, grads, strict=True):
                    param.grad = None if grad is None else grad.to(param.dtype, copy=True)
                optimizer.step()
            for scheduler in self.schedulers:
                scheduler.step()


def state_of(optimizer, params):
    """Return the states of each parameter; that of a parameter never stepped is empty."""
    return [{k: v for k, v in optimizer.state.get(p, {}).items() if isinstance(v, torch.Tensor)} for p in params]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", IN_TORCH)
def test_random_subsets_as_in_torch(case, dtype, compiled):
    """In the middle, torch.optim also continues from our state_dict."""
    name, options, own = IN_TORCH[case]
    ours = parameters(SMALL, dtype)
    theirs = copies(ours)
    torch_class = getattr(torch.optim, name)
    optimizer = getattr(co, name)(in_groups(ours, own), **options, compile=compiled)
    reference = torch_class(in_groups(theirs, own), **options, foreach=False)
    run = Run(optimizer, ours)
    run.add(reference, theirs)
    run.steps(STEPS // 2)

    taken_over = copies(ours)
    successor = torch_class(in_groups(taken_over, own), **options, foreach=False)
    successor.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run.add(successor, taken_over, last=STEPS // 2 - 1)
    run.steps(STEPS // 2)

    for params, other in ((theirs, reference), (taken_over, successor)):
        assert_close(ours, params, TOLERANCE[dtype])
        for found, expected in zip(state_of(optimizer, ours), state_of(other, params), strict=True):
            assert found.keys() == expected.keys()
            assert found.get("step") == expected.get("step")
            assert_close(list(found.values()), list(expected.values()), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", FORMULA_TOLERANCE, ids=str)
@pytest.mark.parametrize("name", FORMULAS)
def test_random_subsets_as_in_the_formula(name, dtype, compiled):
    options, own = FORMULAS[name]
    ours = parameters(SMALL, dtype)
    truth = [torch.nn.Parameter(param.detach().double()) for param in ours]
    optimizer = getattr(co, name)(in_groups(ours, own), **options, compile=compiled)
    reference = FormulaOfEach(in_groups(truth, own), CATALOG[name], **{"lr": optimizer.defaults["lr"], **options})
    run = Run(optimizer, ours)
    run.add(reference, truth)
    run.steps(STEPS)
    assert_close(ours, truth, FORMULA_TOLERANCE[dtype])
    if optimizer.counts_steps:
        stepped = [param for group in optimizer.param_groups for param in group["params"]]
        assert [int(optimizer.state[param]["step"]) for param in stepped] == reference.steps_taken()


def test_another_subset_makes_no_new_plan():
    """Nor does it split the calls: step counts that have come apart stay in one call."""
    params = parameters(SMALL * 5)
    optimizer = co.AdamW(in_groups(params, ({}, {"lr": 1e-2}, {"weight_decay": 0.2})))
    run = Run(optimizer, params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    plan = optimizer._stepper._plan
    run.steps(STEPS)
    assert optimizer._stepper._plan is plan
    assert len({int(optimizer.state[param]["step"]) for param in params}) > 5
    assert optimizer.explain().calls_per_step == 1


def test_a_state_that_was_deleted_is_not_made_again_without_a_gradient(compiled):
    params = parameters([(3,), (4,)])
    optimizer = co.AdamW(params, compile=compiled)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.state.clear()
    params[1].grad = None
    optimizer.step()
    assert list(optimizer.state) == [params[0]]
    assert optimizer.state[params[0]]["step"] == 1


def test_buckets_without_gradients_are_not_run(monkeypatch, compiled):
    """Steps during backward have a few gradients each, which should not cost a call of every bucket."""
    params = [
        torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.bfloat16)
    ]
    optimizer = co.AdamW(params, compile=compiled)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    run, ran = TensorBucket.run, []
    monkeypatch.setattr(TensorBucket, "run", lambda self, *args: (ran.append(self), run(self, *args)))
    params[0].grad = params[2].grad = None
    optimizer.step()
    assert [bound.bucket.entries[0].index for bound in ran] == [1]
    assert [int(optimizer.state[param]["step"]) for param in params] == [1, 2, 1]
