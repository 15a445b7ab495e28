"""Adadelta: steps scaled by the ratio of two running averages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.engine.hyperparameters import check_usual
from compiled_optim.engine.rule import Group
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import TorchDecayOptions
from compiled_optim.tensors import Number, Tensors


class Adadelta(Optimizer):
    r"""Drop-in for :class:`torch.optim.Adadelta` (Zeiler, 2012, `arXiv:1212.5701 <https://arxiv.org/abs/1212.5701>`_).

    .. math::
        s &= \rho s + (1 - \rho) g^2, \qquad d = \sqrt{\frac{a + \epsilon}{s + \epsilon}} \, g \\
        a &= \rho a + (1 - \rho) d^2, \qquad p = p - lr \cdot d

    It needs no tuned learning rate, and learns slowly; try :class:`~compiled_optim.AdamW` first.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: learning rate; a float or a tensor of one element.
        rho: decay rate of both averages.
        eps: added under the root.
        weight_decay: added to the gradient, times the parameter.
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`; ``foreach`` and ``capturable`` have no effect.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = Adadelta([weight], compile=False)
    >>> weight.sum().backward()
    >>> opt.step()
    >>> [round(value, 5) for value in weight.tolist()]
    [0.99684, 0.99684]
    """

    has_torch_switches = True

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        **options: Unpack[TorchDecayOptions],
    ) -> None:
        defaults = dict(lr=lr, rho=rho, eps=eps, weight_decay=weight_decay, maximize=maximize)
        super().__init__(params, defaults, **options)

    def check(self, group: Group) -> None:
        check_usual(group)
        if not 0.0 <= group["rho"] <= 1.0:
            raise ValueError(f"Invalid rho value: {group['rho']}")

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        return {"has_weight_decay": bool(group["weight_decay"] != 0)}

    @staticmethod
    def update(
        p: Tensors, g: Tensors, square_avg: Tensors, acc_delta: Tensors, *,
        lr: Number, rho: Number, eps: Number, weight_decay: Number, has_weight_decay: bool,
    ) -> None:  # fmt: skip
        if has_weight_decay:
            g = g + weight_decay * p
        square_avg.ema_(g * g, rho)  # s = rho s + (1 - rho) g²
        delta = ((acc_delta + eps) / (square_avg + eps)).sqrt() * g
        acc_delta.ema_(delta * delta, rho)  # a = rho a + (1 - rho) d²
        p -= lr * delta
