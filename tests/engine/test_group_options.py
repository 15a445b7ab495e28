"""Tests of changing parameter groups and hyperparameters, torch's flags, and the contexts that a step runs in.

These are cases in which torch_npu's fused optimizers fail. Each is compared with torch.optim.
"""

from __future__ import annotations

import warnings

import pytest
import torch

import compiled_optim as co
from tests.helpers import SMALL, assert_close, copies, gradients, parameters, train

from .pairs import OPTIMIZERS, Pair


@pytest.fixture(params=OPTIMIZERS)
def name(request):
    return request.param


def test_add_param_group_after_steps(name, compiled):
    pair = Pair(name, parameters(SMALL), compiled)
    pair.steps(3)
    for optimizer, params in ((pair.optimizer, pair.ours), (pair.reference, pair.theirs)):
        params += parameters([(6,), (2, 2)], seed=5)
        optimizer.add_param_group({"params": params[-2:], "lr": 0.05})
    pair.steps(3, seed=2)
    pair.agree()


def test_groups_with_their_own_hyperparameters(name, compiled):
    def groups(params):
        return [{"params": params[::2], "lr": 0.01}, {"params": params[1::2], "weight_decay": 0.3, "maximize": True}]

    pair = Pair(name, parameters(SMALL), compiled, groups=groups)
    pair.steps(4)
    pair.agree()


def test_lr_tensor_changed_in_place(name, compiled):
    pair = Pair(name, parameters(SMALL), compiled, lr=torch.tensor(0.1))
    for seed in range(4):
        pair.steps(1, seed=seed)
        for optimizer in (pair.optimizer, pair.reference):
            optimizer.param_groups[0]["lr"].mul_(0.5)
    pair.agree()


def test_tensor_betas(compiled):
    pair = Pair("AdamW", parameters(SMALL), compiled, betas=(torch.tensor(0.8), torch.tensor(0.95)))
    pair.steps(3)
    pair.agree()


def test_torch_switches_are_accepted_without_effect(name, compiled):
    pair = Pair(name, parameters(SMALL), compiled)
    switched = getattr(co, name)(
        copies(pair.ours), **OPTIMIZERS[name], foreach=True, fused=True, capturable=True, compile=compiled
    )
    params = switched.param_groups[0]["params"]
    for grads in gradients(params, 3):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        switched.step()
        switched.zero_grad(set_to_none=False)
    pair.steps(3)
    assert_close(params, pair.ours, 0)
    with pytest.raises(NotImplementedError, match=r"use torch\.optim"):
        getattr(co, name)(params, differentiable=True)


def test_changed_options_change_the_formula(compiled):
    """Momentum, weight decay and amsgrad are enabled during training."""
    pair = Pair("SGD", parameters(SMALL), compiled, momentum=0, dampening=0, weight_decay=0)
    pair.steps(2)
    for change in ({"momentum": 0.9}, {"weight_decay": 0.1}, {"nesterov": True}, {"maximize": True}):
        for optimizer in (pair.optimizer, pair.reference):
            optimizer.param_groups[0].update(change)
        pair.steps(2)
    pair.agree()


def test_runs_inside_other_contexts(compiled):
    """Autocast, inference mode, and the user's default dtype and device do not affect the step."""
    pair = Pair("AdamW", parameters(SMALL), compiled)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            pair.optimizer.step()
            for params in (pair.ours, pair.theirs):
                for param in params:
                    param.grad = torch.ones_like(param)
            pair.optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    pair.reference.step()  # outside: torch 2.12 cannot step with another default device
    pair.agree()


def test_no_warnings(name, compiled):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # torch's compiler uses deprecated functions of torch
        warnings.filterwarnings("ignore", message=".*torch.jit", category=DeprecationWarning)
        train(lambda p: getattr(co, name)(p, **OPTIMIZERS[name], compile=compiled), parameters(SMALL), 2)
