"""Tests of ``compare_eager()``, and of eager steps in a debugger."""

from __future__ import annotations

import bdb
import copy

import pytest
import torch

import compiled_optim as co
from compiled_optim.backends import registry
from compiled_optim.backends.eager import EagerBackend
from tests.helpers import assert_close, copies, gradients, parameters

SHAPES = [(5, 3), (7,), (200, 200), ()]


class Wrong(EagerBackend):
    """A backend whose result is off by 0.25 in one tensor."""

    name = "wrong"
    devices = ("cpu",)
    compiles = True

    def compile(self, signature):
        unit = super().compile(signature)

        class WrongUnit(type(unit)):
            def bind(self, shapes, lists, arguments):
                call = unit.bind(shapes, lists, arguments)

                def wrong(grads):
                    call(grads)
                    lists[0][1][2] += 0.25  # parameters first
                    lists[1][1] -= 0.5

                return wrong

        return WrongUnit(signature.program)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0, "maximize": True}], ids=["plain", "clipped"])
def test_the_compiled_step_counts_and_nothing_else_changes(options):
    params = parameters(SHAPES)
    twins = copies(params)
    optimizer, reference = co.AdamW(params, lr=0.1, **options), co.AdamW(twins, lr=0.1, **options)
    for step, grads in enumerate(gradients(params, 4)):
        for param, twin, grad in zip(params, twins, grads, strict=True):
            param.grad, twin.grad = grad, grad.clone()
        if step in (0, 2):
            with optimizer.compare_eager() as comparison:
                optimizer.step()
            assert len(comparison.differences) == len(SHAPES)
            assert comparison.largest < 1e-5
            assert all(set(d.states) == {"exp_avg", "exp_avg_sq"} for d in comparison.differences)
        else:
            optimizer.step()
        reference.step()
        assert_close([param.grad for param in params], [twin.grad for twin in twins], 0)
    assert_close(params, twins, 0)
    for param, twin in zip(params, twins, strict=True):
        assert optimizer.state[param]["step"] == 4
        assert torch.equal(optimizer.state[param]["exp_avg"], reference.state[twin]["exp_avg"])
    explanation = optimizer.explain()
    assert (explanation.recompiles, explanation.events) == (0, ())
    copy.deepcopy(optimizer)


def test_a_difference_is_told_by_name(monkeypatch):
    monkeypatch.setattr(registry, "_backends", {**registry._backends, "wrong": Wrong()})
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    optimizer = co.AdamW(model, backend="wrong")
    model(torch.ones(3)).sum().backward()
    with optimizer.compare_eager() as comparison:
        optimizer.step()
    found = {difference.name: difference for difference in comparison.differences}
    assert set(found) == {f"parameter '{name}'" for name, _ in model.named_parameters()}
    bias = found["parameter '0.bias'"]
    assert bias.largest == pytest.approx(0.25)
    assert bias.states["exp_avg"] == pytest.approx(0.5)
    assert bias.relative == pytest.approx(0.25 / (model[0].bias.detach() - torch.eye(4)[2] * 0.25).abs().max().item())
    assert found["parameter '0.weight'"].largest == 0
    assert comparison.largest == bias.largest
    assert str(comparison).splitlines()[2].startswith("parameter '0.bias'")


def test_what_was_reallocated_is_compared_as_it_is_now():
    model = torch.nn.Linear(3, 2)
    optimizer = co.AdamW(model)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    model.double()
    with optimizer.compare_eager() as comparison:
        optimizer.step()
    assert comparison.largest < 1e-12
    assert len(optimizer.explain().events) == 2
    optimizer.on_realloc = "raise"
    model.float()
    with pytest.raises(co.ReallocationError), optimizer.compare_eager():
        optimizer.step()
    assert "_update" not in vars(optimizer)


def test_closures_missing_gradients_and_odd_values():
    params = parameters([(3,), (2,), (0,)])
    optimizer = co.AdamW(params, lr=0.1)

    def closure():
        params[0].grad = torch.tensor([1.0, float("nan"), float("inf")])
        return 7.0

    with optimizer.compare_eager() as comparison:
        assert optimizer.step(closure) == 7.0
    assert [difference.largest for difference in comparison.differences] == [pytest.approx(0, abs=1e-6), 0, 0]
    assert comparison.differences[1].states == {}


def test_only_the_next_step_is_compared_and_only_in_the_context():
    params = parameters([(3,)])
    params[0].grad = torch.ones(3)
    optimizer = co.SGD(params, lr=0.1)
    with optimizer.compare_eager() as comparison:
        pass
    assert str(comparison) == "no step was made to compare"
    optimizer.step()
    assert comparison.differences == ()
    with optimizer.compare_eager() as comparison:
        optimizer.step()
        first = comparison.differences
        optimizer.step()
    assert comparison.differences is first


def test_an_eager_optimizer_has_nothing_to_compare():
    with (
        pytest.raises(ValueError, match="this optimizer steps eagerly"),
        co.SGD(parameters([(3,)]), compile=False).compare_eager(),
    ):
        pass


class Debugger(bdb.Bdb):
    """A debugger that stops in one function and records its local variables."""

    def __init__(self, function):
        super().__init__()
        self.code = function.__code__
        self.lines = []

    def user_line(self, frame):
        if frame.f_code is self.code:
            self.lines.append((frame.f_lineno, dict(frame.f_locals)))
        self.set_step()


@pytest.mark.parametrize("rule", [co.AdamW, co.Lamb, co.Lion])
def test_eager_steps_can_be_stepped_through(rule):
    params = parameters([(3,), (2, 2)])
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = rule(params, compile=False)
    debugger = Debugger(rule.update)
    debugger.runcall(optimizer.step)
    lines = [line for line, _ in debugger.lines]
    assert len(set(lines)) >= 4, "line by line"
    _, seen = debugger.lines[0]
    assert [tuple(param.shape) for param in seen["p"]] == [(3,), (4,)]
    assert seen["p"][0].data_ptr() == params[0].data_ptr(), "the parameter itself, not a copy"
    assert torch.equal(seen["g"][0], torch.ones(3))
