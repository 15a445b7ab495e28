"""Tests for zero recompiles, counted by the counter of AOTAutograd and by ``explain()``."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

import compiled_optim as co
from tests.helpers import SMALL, parameters


def compilations() -> int:
    """Return the number of graphs that AOTAutograd has compiled in this process."""
    from torch._dynamo.utils import counters

    return counters["aot_autograd"]["total"]


class Run:
    """An optimizer after its first steps. From then on nothing may compile."""

    def __init__(self, name, shapes=SMALL, **options):
        self.params = parameters(shapes)
        self.optimizer = getattr(co, name)(self.params, lr=0.1, **options)
        self.steps(2)
        self.before = compilations()

    def steps(self, count=3, schedulers=()):
        for _ in range(count):
            self.optimizer.zero_grad()
            for param in self.params:
                param.grad = torch.randn_like(param)
            self.optimizer.step()
            for scheduler in schedulers:
                scheduler.step(1.0) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()

    def check(self):
        assert compilations() == self.before
        assert self.optimizer.explain().recompiles == 0
        assert self.optimizer.explain().mode == "compiled"


@pytest.fixture(params=[("SGD", {"momentum": 0.9}), ("Adam", {}), ("AdamW", {})], ids=lambda case: case[0])
def run(request):
    name, options = request.param
    return Run(name, **options)


def test_the_counter_counts():
    """The counter increases when a rule that no other test has is compiled."""

    class Scale(co.Optimizer):
        @staticmethod
        def update(p, g, *, lr):
            p *= lr

    before = compilations()
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = Scale([param], {"lr": 0.5, "maximize": False})
    param.grad = torch.ones(3)
    optimizer.step()
    assert param.tolist() == [0.5] * 3
    assert compilations() == before + 1
    assert optimizer.explain().recompiles == 0
    optimizer.param_groups[0]["maximize"] = True
    optimizer.step()
    assert compilations() == before + 2
    assert optimizer.explain().recompiles == 1


def test_fourteen_learning_rates(run):
    run.steps(14, [LambdaLR(run.optimizer, lambda step: 0.9**step)])
    run.check()


def test_one_cycle_moves_betas_and_momentum(run):
    scheduler = OneCycleLR(run.optimizer, max_lr=0.1, total_steps=14, cycle_momentum=True)
    group = run.optimizer.param_groups[0]
    seen = set()
    for _ in range(12):
        run.steps(1, [scheduler])
        seen.add(group["betas"][0] if "betas" in group else group["momentum"])
    assert len(seen) > 5
    run.check()


def test_reduce_on_plateau(run):
    scheduler = ReduceLROnPlateau(run.optimizer, patience=0)
    run.steps(6, [scheduler])
    assert run.optimizer.param_groups[0]["lr"] < 0.1
    run.check()


def test_load_state_dict(run):
    for _ in range(3):
        run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        run.steps(1)
    run.check()


def test_gradients_fresh_kept_zeroed_and_missing(run):
    for set_to_none in (True, False, True):
        run.optimizer.zero_grad(set_to_none)
        run.optimizer.step()
        run.steps(2)
    run.params[1].grad = None
    run.optimizer.step()
    run.steps(2)
    run.check()


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_changing_subsets_of_gradients(run, max_grad_norm):
    """Units are compiled when a gradient first appears, and never because gradients are absent."""
    choose = random.Random(0)
    run.optimizer.max_grad_norm = max_grad_norm
    new = parameters([(4, 3), (40_000,)], torch.float64)
    run.optimizer.add_param_group({"params": new, "lr": 0.01})
    for params in ([new[0]], [new[1]], [*run.params, *new]):
        step_only(run.optimizer, params)
    before, explained = compilations(), run.optimizer.explain()
    for _ in range(30):
        likely = choose.choice((0, 0.1, 0.5, 1))
        step_only(run.optimizer, [param for param in (*run.params, *new) if choose.random() < likely])
    assert compilations() == before
    assert run.optimizer.explain().recompiles == explained.recompiles
    assert run.optimizer.explain().units == explained.units


def step_only(optimizer, params):
    """Make a step in which only these parameters have a gradient."""
    optimizer.zero_grad()
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()


def test_a_second_model_of_other_shapes(run):
    other = Run(
        type(run.optimizer).__name__,
        [(11, 3), (9,), (4, 4, 4)],
        **({"momentum": 0.9} if "momentum" in run.optimizer.defaults else {}),
    )
    other.steps(3)
    other.check()
    assert other.optimizer.explain().compile_seconds == 0
    assert compilations() == run.before


def test_dynamo_reset_and_stances_of_the_user_do_not_reach_a_step(run):
    torch._dynamo.reset()
    run.steps(2)
    with torch.compiler.set_stance("force_eager"):
        run.steps(2)
    run.check()
    assert run.optimizer.explain().mode == "compiled"


def test_step_inside_a_compiled_function_of_the_user(run):
    @torch.compile(backend="eager")
    def train_step(x):
        y = x * 2
        run.optimizer.step()
        return y + 1

    before = [param.detach().clone() for param in run.params]
    train_step(torch.ones(2))
    assert any(not torch.equal(a, b) for a, b in zip(before, run.params, strict=True))
    assert run.optimizer.explain().recompiles == 0
