"""Adan: Adam with Nesterov momentum, estimated from the change of the gradient between steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.engine.hyperparameters import check_usual
from compiled_optim.engine.rule import Group
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import EngineOptions
from compiled_optim.tensors import Number, Tensors


class Adan(Optimizer):
    r"""Adan (Xie et al., 2022, "Adaptive Nesterov Momentum Algorithm", `arXiv:2208.06677 <https://arxiv.org/abs/2208.06677>`_).

    With :math:`d` the difference to the gradient of the previous step (0 in the first step), and all averages divided
    by :math:`1 - \beta^t`:

    .. math::
        m &= \beta_1 m + (1 - \beta_1) g, \qquad v = \beta_2 v + (1 - \beta_2) d, \qquad
        n = \beta_3 n + (1 - \beta_3) (g + \beta_2 d)^2 \\
        p &= \frac{p - lr \cdot (m + \beta_2 v) / (\sqrt{n} + \epsilon)}{1 + lr \cdot \lambda}

    It is stable with learning rates 5 to 10 times those of AdamW. It keeps four states where AdamW keeps two: do not
    use it where memory is short.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: learning rate; a float or a tensor of one element.
        betas: decay rates; the paper's :math:`\beta_i` are one minus these.
        eps: added to the denominator.
        weight_decay: the decay :math:`\lambda`.
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = Adan([weight], lr=0.5, compile=False)
    >>> weight.sum().backward()
    >>> opt.step()
    >>> weight.tolist()
    [0.5, 0.5]
    """

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize)
        super().__init__(params, defaults, **options)

    def check(self, group: Group) -> None:
        check_usual(group, betas=3)

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        lr, (beta1, beta2, beta3) = float(group["lr"]), map(float, group["betas"])
        return {
            "has_previous": float(step > 1),
            "correction": 1 / math.sqrt(1 - beta3**step),
            "step_size": lr / (1 - beta1**step),
            "lookahead": lr * beta2 / (1 - beta2**step),
            "shrink": 1 / (1 + lr * float(group["weight_decay"])),
        }

    @staticmethod
    def update(
        p: Tensors, g: Tensors, exp_avg: Tensors, exp_avg_diff: Tensors, exp_avg_sq: Tensors, previous_grad: Tensors, *,
        beta1: Number, beta2: Number, beta3: Number, has_previous: Number, correction: Number, eps: Number,
        step_size: Number, lookahead: Number, shrink: Number,
    ) -> None:  # fmt: skip
        d = (g - previous_grad) * has_previous
        exp_avg.ema_(g, beta1)  # m = b1 m + (1 - b1) g
        exp_avg_diff.ema_(d, beta2)  # v = b2 v + (1 - b2) d
        expected = g + beta2 * d
        exp_avg_sq.ema_(expected * expected, beta3)  # n = b3 n + (1 - b3) (g + b2 d)²
        root = exp_avg_sq.sqrt() * correction + eps
        p -= (step_size * exp_avg + lookahead * exp_avg_diff) / root  # p -= lr (m + b2 v) / (sqrt(n) + eps)
        p *= shrink  # p /= 1 + lr wd
        previous_grad.copy_(g)
