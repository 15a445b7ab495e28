"""The modes of Schedule-Free optimizers: ``train()`` and ``eval()`` swap the weights in place."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import compiled_optim as co
from tests.helpers import assert_close, gradients, parameters, train

SHAPES = [(6, 5), (4,)]


def stepped(params, steps=5, **options):
    return train(lambda p: co.ScheduleFreeAdamW(p, lr=0.1, **options), params, steps, schedule=None)


def values(params):
    return [param.detach().clone() for param in params]


def test_eval_has_the_average_of_z(compiled):
    """x is the average of all z: in eval mode, with equal weights, their mean."""
    params = parameters(SHAPES, torch.float64)
    optimizer = co.ScheduleFreeSGD(params, lr=0.1, compile=compiled)
    sums = [torch.zeros_like(param) for param in params]
    for grads in gradients(params, 4):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
        torch._foreach_add_(sums, [optimizer.state[param]["z"] for param in params])
    optimizer.eval()
    assert_close(params, [total / 4 for total in sums], 1e-12)


@pytest.mark.parametrize("options", [{}, {"layout": "flat", "compile": False}])
def test_modes_are_swapped_in_place(options):
    """Neither the plan nor the guard sees a change, and a mode that is set already changes nothing."""
    params = parameters(SHAPES)
    optimizer = stepped(params, on_realloc="raise", **options)
    plan, addresses, y = optimizer._stepper._plan, [p.data_ptr() for p in params], values(params)
    optimizer.train()
    assert_close(params, y, 0)
    optimizer.eval()
    x = values(params)
    assert not torch.equal(x[0], y[0])
    optimizer.eval()
    assert_close(params, x, 0)
    optimizer.train()
    assert_close(params, y, 1e-6)
    assert [p.data_ptr() for p in params] == addresses
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer._stepper._plan is plan
    assert not optimizer.explain().events


def test_a_step_in_eval_mode_raises_and_changes_nothing():
    params = parameters(SHAPES)
    optimizer = stepped(params, compile=False)
    optimizer.eval()
    before, state = values(params), copy.deepcopy(optimizer.state_dict())
    called = []
    with pytest.raises(RuntimeError, match=r"ScheduleFreeAdamW is in eval mode: .* call optimizer.train\(\)"):
        optimizer.step(lambda: called.append(1))
    assert not called
    assert_close(params, before, 0)
    assert optimizer.state_dict()["param_groups"] == state["param_groups"]


def test_a_checkpoint_holds_the_mode():
    params = parameters(SHAPES)
    optimizer = stepped(params, compile=False)
    y = values(params)
    optimizer.eval()
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    resumed = co.ScheduleFreeAdamW(twins, lr=0.1, compile=False)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(RuntimeError, match="eval mode"):
        resumed.step()
    resumed.train()
    assert_close(twins, y, 1e-6)
    assert copy.deepcopy(optimizer).param_groups[0]["train_mode"] is False


@pytest.mark.parametrize("options", [{"master_weights": True}, {"rounding": "kahan"}], ids=str)
def test_the_swap_keeps_the_bits_beyond_low_precision(options):
    """There and back again, weights in bfloat16 with more bits beside them are what they were in float32."""
    params = parameters(SHAPES, torch.bfloat16)
    optimizer = stepped(params, compile=False, **options)

    def exact(param):
        state = optimizer.state[param]
        return state["master"].clone() if "master" in state else param.float() + state["compensation"].float()

    before = [exact(param) for param in params]
    optimizer.eval()
    assert not torch.equal(exact(params[0]), before[0])
    optimizer.train()
    tolerance = 1e-6 if "master_weights" in options else 1e-4
    assert_close([exact(param) for param in params], before, tolerance)


def test_a_skipped_step_does_not_count():
    """GradScaler skips a step with an overflow: the counters of the groups stay as they are."""
    params = parameters(SHAPES)
    optimizer = stepped(params, compile=False, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    params[0].grad = torch.full_like(params[0], float("inf"))
    before = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    scaler.step(optimizer)
    scaler.update()
    assert {key: value for key, value in optimizer.param_groups[0].items() if key != "params"} == before
    params[0].grad = torch.ones_like(params[0])
    scaler.step(optimizer)
    assert optimizer.param_groups[0]["k"] == before["k"] + 1


def test_in_backward_counts_an_iteration_once():
    net, twin = nn.Linear(4, 3), nn.Linear(4, 3)
    twin.load_state_dict(net.state_dict())
    optimizer = co.ScheduleFreeAdamW(net, lr=0.1, compile=False, in_backward=True)
    reference = co.ScheduleFreeAdamW(twin, lr=0.1, compile=False)
    for _ in range(3):
        for model, stepper in ((net, optimizer), (twin, reference)):
            model(torch.ones(2, 4)).square().sum().backward()
            stepper.step()
            stepper.zero_grad()
    assert optimizer.param_groups[0]["k"] == 3
    assert_close([*net.parameters()], [*twin.parameters()], 1e-6)


def test_modes_change_a_replaced_parameter(monkeypatch):
    """``net.double()`` makes new parameters here, which ``eval()`` has to change."""
    net = nn.Linear(4, 3)
    optimizer = co.ScheduleFreeSGD(net, lr=0.1, compile=False)
    for _ in range(3):
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    monkeypatch.setattr(torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True)
    net.double()
    y = values(net.parameters())
    optimizer.eval()
    assert not torch.allclose(net.weight, y[0])
    optimizer.train()
    assert_close([*net.parameters()], y, 1e-12)
