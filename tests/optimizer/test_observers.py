"""Tests of hooks, profilers and torch.compile around a step: each observes a step once, and has no cost if absent."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import compiled_optim as co
from tests.helpers import parameters


class Overriding(co.SGD):
    def step(self, closure=None):
        return super().step(closure)


@pytest.fixture(params=[co.SGD, Overriding])
def optimizer(request, compiled):
    (param,) = parameters([(3,)])
    param.grad = torch.ones(3)
    return request.param([param], lr=0.1, compile=compiled)


def test_hooks_are_called_once(optimizer):
    told = []
    handles = [
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: told.append("pre")),
        optimizer.register_step_post_hook(lambda opt, args, kwargs: told.append("post")),
        register_optimizer_step_pre_hook(lambda opt, args, kwargs: told.append("global pre")),
        register_optimizer_step_post_hook(lambda opt, args, kwargs: told.append("global post")),
    ]
    optimizer.step()
    assert told == ["global pre", "pre", "post", "global post"]
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert len(told) == 4


def test_a_hook_may_change_the_arguments(optimizer):
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: ((args[0], lambda: 7.0), {}))
    assert optimizer.step() == 7.0


def test_a_profiler_sees_one_range_for_each_step(optimizer):
    with torch.profiler.profile() as profile:
        optimizer.step()
        optimizer.step()
    name = f"Optimizer.step#{type(optimizer).__name__}.step"
    assert [event.count for event in profile.key_averages() if event.key == name] == [2]


def test_a_step_inside_a_compiled_function(optimizer):
    (param,) = optimizer.param_groups[0]["params"]
    before = param.detach().clone()

    @torch.compile(backend="eager")
    def train(x):
        optimizer.step()
        return x + 1

    for _ in range(3):
        train(torch.ones(2))
    torch.testing.assert_close(param.detach(), before - 0.3)


def test_schedulers_find_their_step(optimizer):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_the_signature_of_a_step_is_torchs():
    assert list(inspect.signature(co.AdamW.step).parameters) == list(
        inspect.signature(torch.optim.AdamW.step).parameters
    )
