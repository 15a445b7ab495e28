"""``max_grad_norm`` equals ``clip_grad_norm_`` followed by a step, and does not change the gradients."""

from __future__ import annotations

import pytest
import torch

import compiled_optim as co
from tests.helpers import LARGE, SMALL, assert_close, copies, gradients, parameters


@pytest.mark.parametrize("max_norm", [0.5, 1e6], ids=["clips", "does not clip"])
@pytest.mark.parametrize("maximize", [False, True])
def test_equals_clip_grad_norm(max_norm, maximize, compiled):
    params = parameters(SMALL + LARGE)
    twins = copies(params)
    groups = [{"params": params[:3], "lr": 0.5}, {"params": params[3:]}]
    # SGD, because the steps of Adam hardly depend on the scale of the gradients
    optimizer = co.SGD(groups, lr=0.1, momentum=0.9, maximize=maximize, max_grad_norm=max_norm, compile=compiled)
    reference = torch.optim.SGD(
        [{"params": twins[:3], "lr": 0.5}, {"params": twins[3:]}], lr=0.1, momentum=0.9, maximize=maximize
    )
    for grads in gradients(params, 4):
        for param, twin, grad in zip(params, twins, grads, strict=True):
            param.grad, twin.grad = grad.clone(), grad.clone()
        norm = torch.cat([grad.flatten() for grad in grads]).double().norm()
        torch.nn.utils.clip_grad_norm_(twins, max_norm)
        reference.step()
        optimizer.step()
        assert all(torch.equal(param.grad, grad) for param, grad in zip(params, grads, strict=True))
        assert optimizer.last_grad_norm.shape == ()
        torch.testing.assert_close(optimizer.last_grad_norm.double(), norm, rtol=1e-6, atol=0)
    assert_close(params, twins, 5e-6)  # torch's norm has a relative error of 2e-6


def test_norm_over_several_dtypes_is_accumulated_in_float32_or_better(compiled):
    params = [torch.nn.Parameter(torch.zeros(3000, dtype=d)) for d in (torch.float16, torch.bfloat16, torch.float64)]
    optimizer = co.SGD(params, lr=1.0, max_grad_norm=1.0, compile=compiled)
    for param in params:
        param.grad = torch.full_like(param, 8.0)  # the sum of squares overflows float16
    optimizer.step()
    expected = (9000 * 64) ** 0.5
    assert optimizer.last_grad_norm.item() == pytest.approx(expected, rel=1e-6)
    for param in params:
        assert param[0].item() == pytest.approx(-8.0 / expected, rel=1e-2)


def test_non_finite_norm_poisons_the_step_as_in_torch(compiled):
    params = parameters([(3,)])
    twins = copies(params)
    for optimizer, (param,) in (
        (co.SGD(params, max_grad_norm=1.0, compile=compiled), params),
        (torch.optim.SGD(twins), twins),
    ):
        param.grad = torch.tensor([1.0, float("inf"), 2.0])
        if param is twins[0]:
            torch.nn.utils.clip_grad_norm_(twins, 1.0)
        optimizer.step()
    assert torch.equal(params[0].isnan(), twins[0].isnan())
    assert torch.equal(params[0][~params[0].isnan()], twins[0][~twins[0].isnan()])


def test_no_gradients(compiled):
    optimizer = co.SGD(parameters([(3,)]), max_grad_norm=1.0, compile=compiled)
    optimizer.step()
    assert optimizer.last_grad_norm.item() == 0.0
