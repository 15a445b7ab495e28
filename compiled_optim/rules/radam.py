"""RAdam: Adam that starts without the second moment, until its estimate is reliable."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.engine.rule import Group
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import TorchOptions
from compiled_optim.tensors import Number, Tensors

RELIABLE = 5.0
"""The length of the average of squares above which the second moment is used."""


class RAdam(Optimizer):
    r"""Drop-in for :class:`torch.optim.RAdam` (Liu et al., 2019, `arXiv:1908.03265 <https://arxiv.org/abs/1908.03265>`_).

    With :math:`\rho_\infty = 2 / (1 - \beta_2) - 1` and
    :math:`\rho = \rho_\infty - 2 t \beta_2^t / (1 - \beta_2^t)`, where :math:`\rho > 5`:

    .. math::
        m &= \beta_1 m + (1 - \beta_1) g, \qquad v = \beta_2 v + (1 - \beta_2) g^2 \\
        r &= \sqrt{\frac{(\rho - 4) (\rho - 2) \rho_\infty}{(\rho_\infty - 4) (\rho_\infty - 2) \rho}} \\
        p &= p - \frac{lr}{1 - \beta_1^t} \cdot r \cdot \sqrt{1 - \beta_2^t} \cdot \frac{m}{\sqrt{v} + \epsilon}

    In the first steps, where :math:`\rho \le 5`, it is :math:`p = p - \frac{lr}{1 - \beta_1^t} m`. Use it in place of
    Adam if there is no learning rate warm-up; with one, :class:`~compiled_optim.AdamW` does the same.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: learning rate; a float or a tensor of one element.
        betas: decay rates of the averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: added to the gradient, times the parameter.
        decoupled_weight_decay: decay as :class:`~compiled_optim.AdamW` does.
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`; ``foreach`` and ``capturable`` have no effect.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = RAdam([weight], lr=0.5, compile=False)
    >>> (0.5 * weight).sum().backward()
    >>> opt.step()
    >>> [round(value, 6) for value in weight.tolist()]
    [0.75, 0.75]
    """

    has_torch_switches = True

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize)
        super().__init__(params, {**defaults, "decoupled_weight_decay": decoupled_weight_decay}, **options)

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
        beta1, beta2 = map(float, group["betas"])
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * step * beta2**step / (1 - beta2**step)
        is_reliable = length > RELIABLE
        factor = 1.0
        if is_reliable:
            variance = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
            factor = math.sqrt(variance * (1 - beta2**step))
        return {
            "coupled_weight_decay": weight_decay != 0 and not group["decoupled_weight_decay"],
            "decoupled_weight_decay": weight_decay != 0 and bool(group["decoupled_weight_decay"]),
            "shrink": 1 - lr * weight_decay,
            "is_reliable": float(is_reliable),
            "step_size": factor * lr / (1 - beta1**step),
        }

    @staticmethod
    def update(
        p: Tensors, g: Tensors, exp_avg: Tensors, exp_avg_sq: Tensors, *,
        weight_decay: Number, shrink: Number, beta1: Number, beta2: Number, eps: Number, is_reliable: Number,
        step_size: Number, coupled_weight_decay: bool, decoupled_weight_decay: bool,
    ) -> None:  # fmt: skip
        if decoupled_weight_decay:
            p *= shrink  # p = (1 - lr wd) p
        if coupled_weight_decay:
            g = g + weight_decay * p
        exp_avg.ema_(g, beta1)  # m = b1 m + (1 - b1) g
        exp_avg_sq.ema_(g * g, beta2)  # v = b2 v + (1 - b2) g²
        root = is_reliable * (exp_avg_sq.sqrt() + eps) + (1 - is_reliable)  # sqrt(v) + eps, or 1
        p -= step_size * (exp_avg / root)
