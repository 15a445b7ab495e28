"""Rules that violate the contract of a rule in one place each, and the error that each must raise.

``# HERE`` marks the line that the error must name.
"""

from __future__ import annotations

import numpy as np
import torch

import compiled_optim as co


class Momentum(co.Optimizer):
    """A valid rule. The other rules violate the contract in one place each."""

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr, "heavy": False}, **options)

    def derived(self, group, step):
        return {"momentum": 0.9}

    @staticmethod
    def update(p, g, buffer, *, lr, momentum, heavy):
        buffer.ema_(g, momentum)
        p -= lr * (buffer if heavy else g)


class Branches(Momentum):
    @staticmethod
    def update(params, grads, buffer, *, lr, momentum):
        for param, grad in zip(params, grads, strict=True):
            if grad.norm() > 1:  # HERE
                grad = grad / grad.norm()
            param.sub_(grad * lr)


class BranchesOnAHyperparameter(Momentum):
    @staticmethod
    def update(p, g, *, lr, momentum):
        if lr > 0:  # HERE
            p -= lr * g


class ComparesAHyperparameter(Momentum):
    @staticmethod
    def update(p, g, *, lr, momentum):
        if lr == 0:  # HERE
            return
        p -= lr * g


class TakesAnItem(Momentum):
    @staticmethod
    def update(p, g, *, lr, momentum):
        p -= lr * g * g[0].sum().item()  # HERE


class TakesAFloat(Momentum):
    @staticmethod
    def update(p, g, *, lr, momentum):
        p -= float(lr) * g  # HERE


class ReadsWithinTorch(Momentum):
    @staticmethod
    def update(p, g, *, lr, momentum):
        torch._foreach_addcmul_(p, g, g, value=lr)  # HERE


class UsesNumpy(Momentum):
    @staticmethod
    def update(p, g, *, lr, momentum):
        torch._foreach_sub_(p, [lr * torch.from_numpy(np.sign(grad.numpy())) for grad in g])  # HERE


class PrintsATensor(Momentum):
    @staticmethod
    def update(p, g, *, lr, momentum):
        print("lr is", lr)  # HERE
        p -= lr * g


class RebindsAState(Momentum):
    @staticmethod
    def update(p, g, buffer, *, lr, momentum):
        buffer = momentum * buffer + g  # HERE
        p -= lr * buffer


class ReplacesItemsOfAState(Momentum):
    @staticmethod
    def update(p, g, buffer, *, lr, momentum):
        for i, grad in enumerate(g):
            buffer[i] = momentum * buffer[i] + grad  # HERE
        p -= lr * buffer


class RebindsAnItem(Momentum):
    @staticmethod
    def update(p, g, buffer, *, lr, momentum):
        for param, grad, state in zip(p, g, buffer, strict=True):
            state = momentum * state + grad  # HERE
            param -= lr * state


class RebindsTheParameters(Momentum):
    @staticmethod
    def update(params, g, *, lr, momentum):
        params = params - lr * g  # HERE


class StepsTheFirstParameter(Momentum):
    @staticmethod  # HERE
    def update(p, g, *, lr, momentum):
        p[0].sub_(g[0] * lr)


class WritesToGradients(Momentum):
    @staticmethod
    def update(p, g, *, lr, momentum):
        g *= lr  # HERE
        p -= g


class WritesToAViewOfAGradient(Momentum):
    @staticmethod
    def update(p, g, *, lr, momentum):
        g[0][:1].zero_()  # HERE
        p -= lr * g


class ResizesAState(Momentum):
    @staticmethod  # HERE
    def update(p, g, buffer, *, lr, momentum):
        for state in buffer:
            state.resize_(1).zero_()
        p -= lr * g


class WantsAnotherShape(Momentum):
    @staticmethod
    def update(p, g, buffer, *, lr, momentum):
        for state, grad in zip(buffer, g, strict=True):
            state.copy_(torch.stack([grad, grad]))  # HERE
        p -= lr * g


class DerivesATensor(Momentum):
    def derived(self, group, step):  # HERE
        return {"momentum": torch.tensor(0.9)}


class DerivesLater(Momentum):
    def derived(self, group, step):  # HERE
        return {"momentum": 0.9} if step > 1 else {}


class ChangesToABool(Momentum):
    def derived(self, group, step):  # HERE
        return {"momentum": 0.9 if step > 1 else False}


class ForgetsAScalar(Momentum):
    def derived(self, group, step):
        return {}


class DerivesTooMuch(Momentum):
    def derived(self, group, step):
        return {"momentum": 0.9, "second": 1.0}


class AsksForAnUnknownHyperparameter(Momentum):
    def derived(self, group, step):
        return {"momentum": float(group["rate"])}  # HERE


class DoesNotSayWhenAStateIsKept(Momentum):
    @staticmethod
    def update(p, g, buffer=None, *, lr, momentum):
        p -= lr * g


class GivesAStateAnInitialValue(Momentum):
    @staticmethod  # HERE
    def update(p, g, buffer=1.0, *, lr, momentum):
        p -= lr * g


class NamesAStateStep(Momentum):
    @staticmethod  # HERE
    def update(p, g, step, *, lr, momentum):
        p -= lr * g


class NamesAStateMaster(Momentum):
    @staticmethod  # HERE
    def update(p, g, master, *, lr, momentum):
        master.ema_(g, momentum)
        p -= lr * master


class NamesAStateCompensation(Momentum):
    @staticmethod  # HERE
    def update(p, g, compensation, *, lr, momentum):
        compensation.ema_(g, momentum)
        p -= lr * compensation


class NamesAStateLikeScales(Momentum):
    @staticmethod  # HERE
    def update(p, g, buffer, buffer_scale, *, lr, momentum):
        buffer_scale.ema_(g, momentum)
        p -= lr * buffer_scale


class NamesANumberEma(Momentum):
    counts_steps = True
    numbers = {"ema": 0.0}  # noqa: RUF012

    def derived(self, group, step):
        return {"momentum": 0.9, "ema": group["ema"] + 1}

    @staticmethod  # HERE
    def update(p, g, *, lr, momentum):
        p -= lr * g


class StartsAtAnUnknownHyperparameter(Momentum):
    initial_values = {"buffer": "rate"}  # noqa: RUF012

    @staticmethod  # HERE
    def update(p, g, buffer, *, lr, momentum):
        buffer.ema_(g, momentum)
        p -= lr * buffer


class NeverChangesANumber(Momentum):
    numbers = {"total": 0.0}  # noqa: RUF012

    def derived(self, group, step):  # HERE
        return {"momentum": 0.9}


class KeepsANumberWithoutSteps(Momentum):
    counts_steps = False
    numbers = {"total": 0.0}  # noqa: RUF012

    def derived(self, group, step):
        return {"momentum": 0.9, "total": group["total"] + 1}

    @staticmethod  # HERE
    def update(p, g, *, lr, momentum):
        p -= lr * g


class TakesAnything(Momentum):
    @staticmethod  # HERE
    def update(p, g, *, lr, **rest):
        p -= lr * g


class TakesNoGradients(Momentum):
    @staticmethod  # HERE
    def update(p, *, lr, momentum):
        p *= lr


class NotStatic(Momentum):
    def update(self, p, g, *, lr, momentum):  # HERE
        p -= self.param_groups[0]["lr"] * g


BROKEN = [
    (Branches, "branches on the value of a tensor", "torch.where"),
    (BranchesOnAHyperparameter, "branches on the value of a tensor", "a bool from derived()"),
    (ComparesAHyperparameter, "branches on the value of a tensor", "a bool from derived()"),
    (TakesAnItem, "converts a tensor to a Python number", "0-dim tensor"),
    (TakesAFloat, "converts a tensor to a Python number", "0-dim tensor"),
    (ReadsWithinTorch, "reads the value of a tensor as a number", "0-dim tensor"),
    (UsesNumpy, "converts a tensor to NumPy", "torch operations"),
    (PrintsATensor, "prints a tensor", "compile=False"),
    (RebindsAState, "reads the state 'buffer', but never changes it", "buffer.copy_(...)"),
    (ReplacesItemsOfAState, "reads the state 'buffer', but never changes it", "buffer.copy_(...)"),
    (RebindsAnItem, "reads the state 'buffer', but never changes it", "in place"),
    (RebindsTheParameters, "does not change every parameter", "params *= ..."),
    (StepsTheFirstParameter, "does not change every parameter", "all of them"),
    (WritesToGradients, "writes to the gradients", "g = g + ... and not g += ..."),
    (WritesToAViewOfAGradient, "writes to the gradients", "without an in-place operation"),
    (ResizesAState, "changes the shape of 'buffer'", "the shape of its parameter"),
    (WantsAnotherShape, "fails on two small tensors", "see the error above"),
    (DerivesATensor, "returns momentum=tensor(0.9000), of type Tensor", "return numbers"),
    (DerivesLater, "returns other names in the second step", "same names in every step"),
    (ChangesToABool, "returns other names in the second step", "same names in every step"),
    (ForgetsAScalar, "update takes 'momentum', but it has no value", "return its value from derived()"),
    (DerivesTooMuch, "update does not take 'second', which derived() returns", "keyword-only argument"),
    (AsksForAnUnknownHyperparameter, "asks for a hyperparameter 'rate' that no group has", "defaults"),
    (DoesNotSayWhenAStateIsKept, "does not define when it keeps the optional state 'buffer'", "{'buffer': ...}"),
    (GivesAStateAnInitialValue, "the state 'buffer'", "initial_values"),
    (NamesAStateStep, "uses the name 'step' for a state", "rename the state"),
    (NamesAStateMaster, "uses the name 'master' for a state", "rename the state"),
    (NamesAStateCompensation, "uses the name 'compensation' for a state", "rename the state"),
    (NamesAStateLikeScales, "uses the name 'buffer_scale' for a state", "rename the state"),
    (NamesANumberEma, "uses the name 'ema' for a number", "rename the number"),
    (StartsAtAnUnknownHyperparameter, "starts 'buffer' at 'rate', but no group has such", "an entry of the defaults"),
    (NeverChangesANumber, "never changes the number 'total'", "{'total': ...}"),
    (KeepsANumberWithoutSteps, "keeps the numbers ['total'], but counts no steps", "counts_steps = True"),
    (TakesAnything, "update takes **rest", "each by its name"),
    (TakesNoGradients, "does not take the parameters and the gradients", "update(p, g, states"),
    (NotStatic, "NotStatic.update is not a static method", "@staticmethod"),
]
