"""Regression tests, one for each fixed bug."""

from __future__ import annotations

import pytest
import torch

import compiled_optim as co
from compiled_optim.backends import disk_cache
from tests.helpers import assert_close, copies, gradients, parameters


def step_with_ones(optimizer, *params):
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()


def test_a_replaced_group_is_read(compiled):
    (param,) = parameters([(3,)])
    optimizer = co.SGD([param], lr=0.0, compile=compiled)
    step_with_ones(optimizer, param)
    for replace in (
        lambda: optimizer.param_groups.__setitem__(0, {**optimizer.param_groups[0], "lr": 1.0}),
        lambda: setattr(optimizer, "param_groups", [{**group, "lr": 1.0} for group in optimizer.param_groups]),
    ):
        optimizer.param_groups[0]["lr"] = 0.0
        replace()
        before = param.detach().clone()
        step_with_ones(optimizer, param)
        assert_close([param], [before - 1], 1e-6)


def test_a_parameter_that_moves_to_another_group_is_stepped_as_that_group(compiled):
    p, q, r = parameters([(3,), (4,), (5,)])
    optimizer = co.SGD([{"params": [p, q], "lr": 0.0}, {"params": [r], "lr": 1.0}], compile=compiled)
    step_with_ones(optimizer, p, q, r)
    optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())
    before = q.detach().clone()
    step_with_ones(optimizer, p, q, r)
    assert_close([q], [before - 1], 1e-6)


def test_rules_of_users_are_not_looked_up_by_name(tmp_path, monkeypatch):
    """Two rules have the same name and source, but different closure variables."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def make(constant):
        class Drift(co.Optimizer):
            counts_steps = False

            @staticmethod
            def update(p, g):
                p -= constant

        return Drift

    for constant in (1e-4, 9e-4):
        param = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        step_with_ones(make(constant)([param], {"lr": 0.1, "maximize": False}), param)
        assert param[0].item() == pytest.approx(-constant)
    assert not list((tmp_path / "compiled_optim").glob("*.json"))
    assert disk_cache.directory() == tmp_path.resolve()


def test_complex_states_start_at_their_value_in_both_parts(compiled):
    value = torch.randn(4, 3, dtype=torch.complex64)
    ours, twin = torch.nn.Parameter(value.clone()), torch.nn.Parameter(torch.view_as_real(value).clone())
    grad = torch.randn(4, 3, dtype=torch.complex64)
    for param, g in ((ours, grad), (twin, torch.view_as_real(grad))):
        optimizer = co.RMSpropTF([param], lr=0.1, compile=compiled)
        for _ in range(3):
            param.grad = g.clone()
            optimizer.step()
    assert_close([torch.view_as_real(ours.detach())], [twin], 1e-6)


def test_a_gradient_wider_than_its_parameter_is_not_narrowed(compiled):
    for options, expected in (({"lr": 1e-6}, -1.0), ({"lr": 1.0, "max_grad_norm": 1.0}, -(3**-0.5))):
        param = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
        param.grad_dtype = None
        param.grad = torch.full((3,), 1e6)  # inf in float16
        optimizer = co.SGD([param], **options, compile=compiled)
        optimizer.step()
        assert_close([param], [torch.full((3,), expected)], 1e-3)


def test_centered_rmsprop_is_as_stable_as_torch(compiled):
    """With constant gradients the variance is the difference of equal values. Rounding must not make it negative."""
    params = [torch.nn.Parameter(torch.ones(64))]
    optimizer = co.RMSprop(params, centered=True, lr=1e-5, compile=compiled)
    for _ in range(1500):
        params[0].grad = torch.linspace(0.1, 3, 64)
        optimizer.step()
    assert params[0].isfinite().all()


def test_parameters_with_pending_bits(compiled):
    """torch's loop steps a parameter with a negative bit and rejects one with a conjugate bit. We step both."""
    base = torch.randn(5, dtype=torch.complex64)
    lazy = base.clone().conj().imag.requires_grad_()
    plain = torch.nn.Parameter(lazy.detach().clone())
    assert lazy.is_neg()
    conjugated = base.clone().conj().requires_grad_()
    resolved = torch.nn.Parameter(conjugated.detach().resolve_conj().clone())
    ours = co.Adam([lazy, conjugated], lr=0.1, compile=compiled)
    theirs = torch.optim.Adam([plain, resolved], lr=0.1)
    for _ in range(3):
        step_with_ones(ours, lazy, conjugated)
        step_with_ones(theirs, plain, resolved)
    assert_close([lazy, conjugated], [plain, resolved], 2e-6)


def test_steps_in_and_out_of_inference_mode(compiled):
    params = parameters([(3,), (2, 2)])
    twins = copies(params)
    ours, theirs = co.AdamW(params, lr=0.1, compile=compiled), torch.optim.AdamW(twins, lr=0.1)
    for i, grads in enumerate(gradients(params, 4)):
        for param, twin, grad in zip(params, twins, grads, strict=True):
            param.grad, twin.grad = grad, grad.clone()
        with torch.inference_mode(i % 2 == 0):
            ours.step()
        theirs.step()
    assert_close(params, twins, 2e-6)


def test_tensors_without_memory_that_the_step_does_not_need(compiled):
    (param,) = parameters([(3,)])
    sparse = torch.eye(3).to_sparse().requires_grad_()
    lazy = torch.nn.LazyLinear(2)
    optimizer = co.AdamW([param, sparse, *lazy.parameters()], compile=compiled)
    step_with_ones(optimizer, param)
    optimizer.state[param]["mask"] = torch.ones(3).to_sparse()
    step_with_ones(optimizer, param)
    step_with_ones(optimizer, param)
    assert int(optimizer.state[param]["step"]) == 3


def test_a_parameter_that_moved_while_it_had_no_gradient_is_noticed(compiled):
    p, q = parameters([(3,), (4,)])
    optimizer = co.AdamW([("p", p), ("q", q)], compile=compiled)
    step_with_ones(optimizer, p, q)
    q.grad = None
    optimizer.step()
    q.data = q.data.clone()
    step_with_ones(optimizer, p, q)
    optimizer.zero_grad()
    step_with_ones(optimizer, p)
    (event,) = optimizer.explain().events
    assert event.startswith("parameter 'q': storage changed")


def test_edited_parameter_lists_of_named_groups(compiled):
    model = torch.nn.Linear(3, 2)
    optimizer = co.AdamW(model, compile=compiled)
    extra = torch.nn.Parameter(torch.ones(3))
    optimizer.param_groups[0]["params"] = [*model.parameters(), extra]
    step_with_ones(optimizer, *model.parameters(), extra)
    optimizer.param_groups[0]["params"] = [model.bias]
    step_with_ones(optimizer, model.bias)
    model.bias.data = torch.zeros(2)
    step_with_ones(optimizer, model.bias)
    (event,) = optimizer.explain().events
    assert event.startswith("parameter 'bias': storage changed"), "the watched module knows its name"


def test_no_norm_is_reported_when_nothing_is_clipped(compiled):
    (param,) = parameters([(3,)])
    optimizer = co.BertAdam([param], compile=compiled)
    step_with_ones(optimizer, param)
    assert optimizer.last_grad_norm.item() == pytest.approx(3**0.5)
    optimizer.param_groups[0]["max_grad_norm"] = -1
    step_with_ones(optimizer, param)
    assert optimizer.last_grad_norm is None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("BertAdam", {"t_total": 0}, "Invalid t_total value: 0"),
        ("BertAdam", {"t_total": float("nan")}, "Invalid t_total value: nan"),
        ("BertAdam", {"max_grad_norm": None}, "Invalid max_grad_norm value: None"),
        ("BertAdam", {"max_grad_norm": float("nan")}, "Invalid max_grad_norm value: nan"),
        ("Adam", {"betas": (0.9,)}, "Invalid betas: "),
        ("Lamb", {"betas": (0.9, 0.99, 0.999)}, "Invalid betas: "),
    ],
)
def test_late_errors_come_at_construction(name, options, message):
    with pytest.raises(ValueError, match=message):
        getattr(co, name)(parameters([(2,)]), **options)
