"""Adagrad: steps divided by the root of the sum of all squared gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.engine.hyperparameters import check_not_negative, check_usual
from compiled_optim.engine.rule import Group
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import TorchDecayOptions
from compiled_optim.tensors import Number, Tensors


class Adagrad(Optimizer):
    r"""Drop-in for :class:`torch.optim.Adagrad` (Duchi et al., 2011, "Adaptive Subgradient Methods").

    .. math::
        s &= s + g^2, \qquad
        p = p - \frac{lr}{1 + (t - 1) \cdot \eta} \cdot \frac{g}{\sqrt{s} + \epsilon}

    The sum only grows, so steps shrink to zero. Use it for features that are rarely present, and for convex problems;
    deep networks learn better with :class:`~compiled_optim.AdamW`. For sparse gradients use torch.optim.Adagrad. States
    are created in the first step; torch.optim creates them in the constructor.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: learning rate; a float or a tensor of one element.
        lr_decay: the decay :math:`\eta` of the learning rate.
        weight_decay: added to the gradient, times the parameter.
        initial_accumulator_value: the initial value of the sum.
        eps: added to the denominator.
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`; ``foreach`` and ``capturable`` have no effect.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = Adagrad([weight], lr=0.5, compile=False)
    >>> weight.sum().backward()
    >>> opt.step()
    >>> weight.tolist()
    [0.5, 0.5]
    """

    has_torch_switches = True
    sparse_alternative = "torch.optim.Adagrad"
    initial_values = {"sum": "initial_accumulator_value"}  # noqa: RUF012

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        **options: Unpack[TorchDecayOptions],
    ) -> None:
        defaults = dict(lr=lr, lr_decay=lr_decay, eps=eps, weight_decay=weight_decay, maximize=maximize)
        super().__init__(params, {**defaults, "initial_accumulator_value": initial_accumulator_value}, **options)

    def check(self, group: Group) -> None:
        check_usual(group)
        check_not_negative("lr_decay value", group["lr_decay"])
        check_not_negative("initial_accumulator_value value", group["initial_accumulator_value"])

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        return {
            "has_weight_decay": bool(group["weight_decay"] != 0),
            "step_size": float(group["lr"]) / (1 + (step - 1) * float(group["lr_decay"])),
        }

    @staticmethod
    def update(
        p: Tensors, g: Tensors, sum: Tensors, *,
        eps: Number, weight_decay: Number, step_size: Number, has_weight_decay: bool,
    ) -> None:  # fmt: skip
        if has_weight_decay:
            g = g + weight_decay * p
        sum += g * g
        p -= step_size * (g / (sum.sqrt() + eps))
