"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.engine.rule import Group
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import EngineOptions
from compiled_optim.tensors import Number, Tensors


class Lion(Optimizer):
    r"""Lion (Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms", `arXiv:2302.06675 <https://arxiv.org/abs/2302.06675>`_).

    .. math::
        p &= p - lr \cdot (\operatorname{sign}(\beta_1 m + (1 - \beta_1) g) + \lambda p) \\
        m &= \beta_2 m + (1 - \beta_2) g

    It keeps one state where Adam keeps two, and moves every element by ``lr``. Its steps are larger than Adam's: take a
    learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger by the same factor. With small batches
    the sign is mostly noise; use AdamW there.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: learning rate; a float or a tensor of one element.
        betas: the interpolation of the step, and the decay rate of the momentum.
        weight_decay: the decoupled decay :math:`\lambda`.
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = Lion([weight], lr=0.25, weight_decay=1.0, compile=False)
    >>> weight.sum().backward()
    >>> opt.step()
    >>> weight.tolist()
    [0.5, 0.5]
    """

    counts_steps = False

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize), **options)

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        return {"shrink": 1 - float(group["lr"]) * float(group["weight_decay"])}

    @staticmethod
    def update(
        p: Tensors, g: Tensors, exp_avg: Tensors, *, lr: Number, shrink: Number, beta1: Number, beta2: Number
    ) -> None:
        direction = beta1 * exp_avg + (1 - beta1) * g
        p *= shrink  # p = (1 - lr wd) p
        p -= lr * direction.sign()
        exp_avg.ema_(g, beta2)  # m = b2 m + (1 - b2) g
