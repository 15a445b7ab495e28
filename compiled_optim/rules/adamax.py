"""Adamax: Adam with the largest gradient in place of the second moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.engine.rule import Group
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import TorchDecayOptions
from compiled_optim.tensors import Number, Tensors


class Adamax(Optimizer):
    r"""Drop-in for :class:`torch.optim.Adamax` (Kingma and Ba, 2014, `arXiv:1412.6980 <https://arxiv.org/abs/1412.6980>`_).

    .. math::
        m &= \beta_1 m + (1 - \beta_1) g, \qquad u = \max(\beta_2 u, |g| + \epsilon) \\
        p &= p - \frac{lr}{1 - \beta_1^t} \cdot \frac{m}{u}

    One large gradient makes the steps of its element small for about :math:`1 / (1 - \beta_2)` steps. Use it where a
    recipe asks for it, mostly for embeddings and sparse features; else :class:`~compiled_optim.AdamW` is the better
    start.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: learning rate; a float or a tensor of one element.
        betas: decay rates of the average of the gradient, and of the largest gradient.
        eps: added to the absolute value of the gradient.
        weight_decay: added to the gradient, times the parameter.
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`; ``foreach`` and ``capturable`` have no effect.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = Adamax([weight], lr=0.5, compile=False)
    >>> weight.sum().backward()
    >>> opt.step()
    >>> weight.tolist()
    [0.5, 0.5]
    """

    has_torch_switches = True

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        **options: Unpack[TorchDecayOptions],
    ) -> None:
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize)
        super().__init__(params, defaults, **options)

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        return {
            "has_weight_decay": bool(group["weight_decay"] != 0),
            "step_size": float(group["lr"]) / (1 - float(group["betas"][0]) ** step),
        }

    @staticmethod
    def update(
        p: Tensors, g: Tensors, exp_avg: Tensors, exp_inf: Tensors, *,
        beta1: Number, beta2: Number, eps: Number, weight_decay: Number, step_size: Number, has_weight_decay: bool,
    ) -> None:  # fmt: skip
        if has_weight_decay:
            g = g + weight_decay * p
        exp_avg.ema_(g, beta1)  # m = b1 m + (1 - b1) g
        exp_inf *= beta2
        exp_inf.maximum_(g.abs() + eps)  # u = max(b2 u, |g| + eps)
        p -= step_size * (exp_avg / exp_inf)
