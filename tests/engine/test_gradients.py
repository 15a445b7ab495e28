"""Tests of gradients that are added, removed or views, and of closures. A step never writes to a gradient.

These are cases in which torch_npu's fused optimizers fail. Each is compared with torch.optim.
"""

from __future__ import annotations

import pytest
import torch

import compiled_optim as co
from tests.helpers import SMALL, assert_close, gradients, parameters

from .pairs import OPTIMIZERS, Pair


@pytest.fixture(params=OPTIMIZERS)
def name(request):
    return request.param


def test_gradient_that_appears_later(name, compiled):
    pair = Pair(name, parameters(SMALL), compiled)
    pair.steps(6, mask=lambda step, i: i != 1 or step >= 3)
    pair.agree()


def test_gradient_that_goes_away_leaves_parameter_and_step_alone(name, compiled):
    pair = Pair(name, parameters(SMALL), compiled)
    pair.steps(6, mask=lambda step, i: i != 1 or step < 3)
    pair.agree()
    if name != "SGD":
        assert [int(pair.optimizer.state[p]["step"]) for p in pair.ours] == [6, 3, 6, 6, 6, 6, 6]


def test_no_gradients_at_all(name, compiled):
    params = parameters(SMALL)
    optimizer = getattr(co, name)(params, **OPTIMIZERS[name], compile=compiled)
    assert optimizer.step() is None
    assert_close(params, parameters(SMALL), 0)
    assert not optimizer.state


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(name, compiled, set_to_none):
    pair = Pair(name, parameters(SMALL), compiled)
    pair.steps(2)
    for optimizer in (pair.optimizer, pair.reference):
        optimizer.zero_grad(set_to_none)
        optimizer.step()
    assert all((p.grad is None) == set_to_none for p in pair.ours)
    pair.agree()


def test_closure_runs_with_grad_and_its_loss_is_returned(name, compiled):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = getattr(co, name)([param], **OPTIMIZERS[name], compile=compiled)

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() == 3.0
    assert (param < 1).all()


def test_autograd_notices_that_parameters_changed(name, compiled):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = getattr(co, name)([weight], **OPTIMIZERS[name], compile=compiled)
    loss = (weight * weight).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradient_with_a_pending_negation(name, compiled):
    pair = Pair(name, parameters([(5,)]), compiled)
    grad = torch.randn(5, dtype=torch.complex64).conj().imag
    assert grad.is_neg()
    pair.step([grad])
    pair.agree()


def test_gradients_are_never_written(name, compiled):
    params = parameters(SMALL)
    optimizer = getattr(co, name)(params, **OPTIMIZERS[name], maximize=True, max_grad_norm=0.1, compile=compiled)
    for grads in gradients(params, 2):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        assert all(torch.equal(param.grad, grad) for param, grad in zip(params, grads, strict=True))
