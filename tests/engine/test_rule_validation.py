"""A rule that violates its contract raises an error with the line and the remedy, before any step."""

from __future__ import annotations

import pickle

import pytest
import torch

import compiled_optim as co
from catalog import CATALOG
from compiled_optim.engine import rule_validation
from tests.helpers import assert_close, copies, gradients, parameters

from . import broken_rules
from .broken_rules import BROKEN, Branches, Momentum, PrintsATensor


@pytest.mark.parametrize(("rule", "what", "remedy"), BROKEN, ids=[case[0].__name__ for case in BROKEN])
def test_broken_rules_are_refused_at_construction(rule, what, remedy):
    with pytest.raises(co.RuleError) as raised:
        rule(parameters([(3,)]))
    assert what in raised.value.what
    assert remedy in raised.value.remedy
    for part in (raised.value.what, raised.value.where, raised.value.remedy):
        assert part in str(raised.value)
    assert f"{broken_rules.__name__.rpartition('.')[-1]}.py:" in raised.value.where
    with open(broken_rules.__file__) as source:
        lines = source.read().splitlines()
    line = int(raised.value.where.split(".py:")[1].split(",")[0])
    body = lines[next(i for i, text in enumerate(lines) if text.startswith(f"class {rule.__name__}(")) :]
    body = body[: next((i for i, text in enumerate(body) if i and text.startswith("class ")), len(body))]
    if any("# HERE" in text for text in body):
        assert "# HERE" in lines[line - 1], raised.value.where


def test_the_message_names_the_line_and_the_remedy():
    with pytest.raises(co.RuleError) as raised:
        Branches(parameters([(3,)]))
    first, second, third = str(raised.value).splitlines()
    assert first == "Branches.update branches on the value of a tensor"
    assert second.startswith("  at ")
    assert second.endswith(", in update: if grad.norm() > 1:  # HERE")
    assert third.startswith("  remedy: choose by torch.where(")
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    assert isinstance(raised.value, TypeError)


class SaysSomething(Momentum):
    @staticmethod
    def update(p, g, *, lr, momentum):
        print("stepping")
        p -= lr * g


def test_side_effects_of_a_rule_happen_when_it_is_traced(capsys):
    """A compiled step does not run the Python code of the rule."""
    params = parameters([(3,)])
    optimizer = SaysSomething(params)
    optimizer.warmup()
    capsys.readouterr()
    for _ in range(3):
        params[0].grad = torch.ones(3)
        optimizer.step()
    assert capsys.readouterr().out == ""
    assert_close(params, [parameters([(3,)])[0] - 0.3], 1e-6)


class ReadsInTheSecondHalf(Momentum):
    """A rule that fails only for tensors of symbolic size, which the trial does not use."""

    @staticmethod
    def update(params, grads, *, lr, momentum):
        for param, grad in zip(params, grads, strict=True):
            if param.numel() > 100:  # HERE
                grad = grad * 2
            param.sub_(grad * lr)


def test_what_only_the_tracer_sees_is_raised_by_warmup_and_step():
    params = parameters([(3,)])
    optimizer = ReadsInTheSecondHalf(params)
    with pytest.raises(co.RuleError, match="cannot be compiled as one graph") as raised:
        optimizer.warmup()
    assert raised.value.where.endswith("# HERE")
    assert "compile=False" in raised.value.remedy
    params[0].grad = torch.ones(3)
    with pytest.raises(co.RuleError):
        optimizer.step()
    assert not optimizer.state
    assert torch.equal(params[0], parameters([(3,)])[0])


def test_eager_rules_may_print_and_branch():
    for rule in (Branches, PrintsATensor, SaysSomething):
        params = parameters([(3,), (2,)])
        for param in params:
            param.grad = torch.ones_like(param)
        rule(params, compile=False).step()
        assert not torch.equal(params[0], parameters([(3,), (2,)])[0])


def test_a_refused_group_is_not_added():
    class Sometimes(Momentum):
        @staticmethod
        def update(p, g, *, lr, momentum, heavy):
            p -= (float(lr) if heavy else lr) * g

    optimizer = Sometimes(parameters([(3,)]))
    with pytest.raises(co.RuleError):
        optimizer.add_param_group({"params": parameters([(2,)]), "heavy": True})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0]["heavy"] = True
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    with pytest.raises(co.RuleError):
        optimizer.step()
    assert not optimizer.state


def test_a_rule_is_tried_once_for_each_of_its_programs(monkeypatch):
    runs = []

    class Counting(Momentum):
        @staticmethod
        def update(p, g, *, lr, momentum, heavy):
            runs.append([tuple(param.shape) for param in p])
            p -= lr * g

    for lr in (0.1, 0.2):
        Counting(parameters([(3,)]), lr=lr)
    Counting(parameters([(3,)]), max_grad_norm=1.0)
    assert runs == [[(3,), (2,)]]
    Counting([{"params": parameters([(3,)]), "heavy": True}])
    Counting(parameters([(3,)]), compile=False)
    assert len(runs) == 2


def test_rules_by_rows_are_tried_with_rows():
    class ByRows(Momentum):
        rowwise = True

        @staticmethod
        def update(params, grads, *, lr, momentum):
            for param, grad in zip(params, grads, strict=True):
                if param.ndim > 1 and grad.sum(1).max() > 0:
                    param.zero_()
                param.sub_(grad * lr)

    with pytest.raises(co.RuleError, match="branches on the value of a tensor"):
        ByRows(parameters([(3,)]))


def test_the_optimizers_of_this_package_are_not_tried(monkeypatch):
    monkeypatch.setattr(rule_validation, "_try_out", None)
    for name in ("AdamW", "Lamb", "Lion", "Adan"):
        getattr(co, name)(parameters([(3,)]))


@pytest.mark.parametrize("name", CATALOG)
def test_the_optimizers_of_this_package_would_pass(name, monkeypatch):
    monkeypatch.setattr(rule_validation, "is_ours", lambda thing: False)
    getattr(co, name)(parameters([(3, 2)]), **{**CATALOG[name].typical, "max_grad_norm": 1.0})


def test_construction_leaves_the_random_state_alone():
    class Fresh(Momentum):
        @staticmethod
        def update(p, g, *, lr, momentum):
            p -= lr * g

    before = torch.get_rng_state()
    with torch.inference_mode():
        Fresh([torch.nn.Parameter(torch.ones(3))])
    assert torch.equal(torch.get_rng_state(), before)


class NoHyperparameters(co.Optimizer):
    def __init__(self, params, **options):
        super().__init__(params, {}, **options)

    @staticmethod
    def update(p, g, momentum):
        momentum += g
        p -= momentum


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_rule_without_hyperparameters(max_norm, compiled):
    ours = parameters([(3,), (1,), (4, 2), (0,)])
    theirs = copies(ours)
    optimizer = NoHyperparameters(ours, compile=compiled, max_grad_norm=max_norm)
    reference = torch.optim.SGD(theirs, lr=1.0, momentum=1.0)
    for grads in gradients(ours, 3):
        for param, twin, grad in zip(ours, theirs, grads, strict=True):
            param.grad, twin.grad = grad, grad.clone()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        optimizer.step()
        reference.step()
    assert_close(ours, theirs, 1e-6)
