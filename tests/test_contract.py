"""A rule that breaks its contract gets an error that names the line and the remedy, before anything is stepped."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

import compiled_optim as co
from catalog import CATALOG
from compiled_optim import contract
from compiled_optim.lists import blend_, minus_scaled_

from .helpers import parameters


class Momentum(co.Optimizer):
    """A rule that keeps its contract; the others break it in one place each."""

    state_names = ("buffer",)

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr, "heavy": False}, **options)

    def options(self, group):
        return {"heavy": group["heavy"]}

    def scalars(self, group, step):
        return {"lr": float(group["lr"]), "momentum": 0.9, "gain": 0.1}

    @staticmethod
    def update(params, grads, *, buffer, lr, momentum, gain, heavy):
        blend_(buffer, momentum, grads, gain)
        minus_scaled_(params, buffer if heavy else grads, lr)


class Branches(Momentum):
    @staticmethod
    def update(params, grads, *, lr, **rest):
        for param, grad in zip(params, grads, strict=True):
            if grad.norm() > 1:  # HERE
                grad = grad / grad.norm()
            param.sub_(grad * lr)


class TakesAnItem(Momentum):
    @staticmethod
    def update(params, grads, *, lr, **rest):
        torch._foreach_add_(params, grads, alpha=-lr.item())  # HERE


class TakesAFloat(Momentum):
    @staticmethod
    def update(params, grads, *, lr, **rest):
        torch._foreach_sub_(params, torch._foreach_mul(grads, float(lr)))  # HERE


class ReadsWithinTorch(Momentum):
    @staticmethod
    def update(params, grads, *, lr, **rest):
        torch._foreach_addcmul_(params, grads, grads, value=lr)  # HERE


class UsesNumpy(Momentum):
    @staticmethod
    def update(params, grads, *, lr, **rest):
        torch._foreach_sub_(params, [lr * torch.from_numpy(np.sign(grad.numpy())) for grad in grads])  # HERE


class PrintsATensor(Momentum):
    @staticmethod
    def update(params, grads, *, lr, **rest):
        print("lr is", lr)  # HERE
        minus_scaled_(params, grads, lr)


class RebindsAState(Momentum):
    @staticmethod
    def update(params, grads, *, buffer, lr, momentum, **rest):
        buffer = torch._foreach_add(torch._foreach_mul(buffer, momentum), grads)  # HERE
        minus_scaled_(params, buffer, lr)


class ReplacesItemsOfAState(Momentum):
    @staticmethod
    def update(params, grads, *, buffer, lr, momentum, **rest):
        for i, grad in enumerate(grads):
            buffer[i] = momentum * buffer[i] + grad  # HERE
        minus_scaled_(params, buffer, lr)


class RebindsAnItem(Momentum):
    @staticmethod
    def update(params, grads, *, buffer, lr, momentum, **rest):
        for param, grad, state in zip(params, grads, buffer, strict=True):
            state = momentum * state + grad  # HERE
            param -= lr * state


class RebindsTheParameters(Momentum):
    @staticmethod
    def update(params, grads, *, lr, **rest):
        params = torch._foreach_sub(params, torch._foreach_mul(grads, lr))  # HERE


class StepsTheFirstParameter(Momentum):
    @staticmethod  # HERE
    def update(params, grads, *, lr, **rest):
        params[0].sub_(grads[0] * lr)


class WritesToGradients(Momentum):
    @staticmethod
    def update(params, grads, *, lr, **rest):
        torch._foreach_mul_(grads, lr)  # HERE
        torch._foreach_sub_(params, grads)


class WritesToAViewOfAGradient(Momentum):
    @staticmethod
    def update(params, grads, *, lr, **rest):
        grads[0][:1].zero_()  # HERE
        minus_scaled_(params, grads, lr)


class ResizesAState(Momentum):
    @staticmethod  # HERE
    def update(params, grads, *, buffer, lr, **rest):
        for state in buffer:
            state.resize_(1).zero_()
        minus_scaled_(params, grads, lr)


class WantsAnotherShape(Momentum):
    @staticmethod
    def update(params, grads, *, buffer, lr, **rest):
        for state, grad in zip(buffer, grads, strict=True):
            state.copy_(torch.stack([grad, grad]))  # HERE
        minus_scaled_(params, grads, lr)


class DeclaresAShape(Momentum):
    def initial_state(self, group):  # HERE
        return {"buffer": (3, 4)}


class OptionIsAFloat(Momentum):
    def options(self, group):  # HERE
        return {"heavy": False, "lr": group["lr"]}


class ScalarIsATensor(Momentum):
    def scalars(self, group, step):  # HERE
        return {"lr": torch.tensor(0.1), "momentum": 0.9, "gain": 0.1}


class ScalarsComeLater(Momentum):
    def scalars(self, group, step):  # HERE
        return {"lr": 0.1, "gain": 0.1, **({"momentum": 0.9} if step > 1 else {})}


class ForgetsAScalar(Momentum):
    def scalars(self, group, step):
        return {"lr": 0.1, "gain": 0.1}


class DeclaresTooMuch(Momentum):
    state_names = ("buffer", "second")


class AsksForAnUnknownHyperparameter(Momentum):
    def scalars(self, group, step):
        return {"lr": float(group["rate"]), "momentum": 0.9, "gain": 0.1}  # HERE


class OneNameForTwoThings(Momentum):
    state_names = ("buffer", "lr")


class NotStatic(Momentum):
    def update(self, params, grads, *, buffer, lr, momentum, gain, heavy):  # HERE
        torch._foreach_sub_(params, torch._foreach_mul(grads, self.param_groups[0]["lr"]))


BROKEN = [
    (Branches, "branches on the value of a tensor", "torch.where"),
    (TakesAnItem, "makes a tensor a Python number", "0-dim tensor"),
    (TakesAFloat, "makes a tensor a Python number", "0-dim tensor"),
    (ReadsWithinTorch, "reads the value of a tensor as a number", "0-dim tensor"),
    (UsesNumpy, "hands a tensor to NumPy", "torch operations"),
    (PrintsATensor, "prints a tensor", "compile=False"),
    (RebindsAState, "reads the state 'buffer', but never changes it", "_foreach_copy_(buffer, ...)"),
    (ReplacesItemsOfAState, "reads the state 'buffer', but never changes it", "_foreach_copy_(buffer, ...)"),
    (RebindsAnItem, "reads the state 'buffer', but never changes it", "in place"),
    (RebindsTheParameters, "does not change every parameter", "_foreach_mul_(params, ...)"),
    (StepsTheFirstParameter, "does not change every parameter", "all of them"),
    (WritesToGradients, "writes to the gradients", "without the last underscore"),
    (WritesToAViewOfAGradient, "writes to the gradients", "without the last underscore"),
    (ResizesAState, "changes the shape of 'buffer'", "the shape of its parameter"),
    (WantsAnotherShape, "fails on two small tensors", "see the error above"),
    (DeclaresAShape, "gives buffer=(3, 4), of type tuple", "the shape of its parameter"),
    (OptionIsAFloat, "OptionIsAFloat.options gives lr=0.1, of type float", "return numbers from scalars()"),
    (ScalarIsATensor, "gives lr=tensor(0.1000), of type Tensor", "float(...)"),
    (ScalarsComeLater, "gives other names in the second step", "same names in every step"),
    (ForgetsAScalar, "update needs 'momentum', which nothing gives it", "a number in scalars()"),
    (DeclaresTooMuch, "update does not take 'second', which is declared", "keyword argument"),
    (AsksForAnUnknownHyperparameter, "asks for a hyperparameter 'rate' that no group has", "defaults"),
    (OneNameForTwoThings, "uses the name 'lr' for two things", "rename one"),
    (NotStatic, "NotStatic.update is not a static method", "@staticmethod"),
]


@pytest.mark.parametrize(("rule", "what", "remedy"), BROKEN, ids=[case[0].__name__ for case in BROKEN])
def test_broken_rules_are_refused_at_construction(rule, what, remedy):
    with pytest.raises(co.RuleError) as raised:
        rule(parameters([(3,)]))
    assert what in raised.value.what
    assert remedy in raised.value.remedy
    for part in (raised.value.what, raised.value.where, raised.value.remedy):
        assert part in str(raised.value)
    assert f"{__name__.rpartition('.')[-1]}.py:" in raised.value.where
    with open(__file__) as source:
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
    def update(params, grads, *, lr, **rest):
        print("stepping")  # HERE
        minus_scaled_(params, grads, lr)


def test_what_only_the_tracer_sees_is_told_by_warmup():
    params = parameters([(3,)])
    optimizer = SaysSomething(params)
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
        def update(params, grads, *, lr, heavy, **rest):
            minus_scaled_(params, grads, lr if not heavy else float(lr))

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
        def update(params, grads, *, lr, **rest):
            runs.append([tuple(param.shape) for param in params])
            minus_scaled_(params, grads, lr)

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
        def update(params, grads, *, lr, **rest):
            for param, grad in zip(params, grads, strict=True):
                if param.ndim > 1 and grad.sum(1).max() > 0:
                    param.zero_()
                param.sub_(grad * lr)

    with pytest.raises(co.RuleError, match="branches on the value of a tensor"):
        ByRows(parameters([(3,)]))


def test_the_optimizers_of_this_package_are_not_checked_at_construction(monkeypatch):
    monkeypatch.setattr(contract, "_try_out", None)
    for name in ("AdamW", "Lamb", "Lion", "Adan"):
        getattr(co, name)(parameters([(3,)]))


@pytest.mark.parametrize("name", CATALOG)
def test_the_optimizers_of_this_package_pass_the_checks_of_user_rules(name, monkeypatch):
    monkeypatch.setattr(contract, "is_ours", lambda thing: False)
    getattr(co, name)(parameters([(3, 2)]), max_grad_norm=1.0, weight_decay=0.1)


def test_construction_leaves_the_random_state_alone():
    class Fresh(Momentum):
        @staticmethod
        def update(params, grads, *, lr, **rest):
            minus_scaled_(params, grads, lr)

    before = torch.get_rng_state()
    with torch.inference_mode():
        Fresh([torch.nn.Parameter(torch.ones(3))])
    assert torch.equal(torch.get_rng_state(), before)
