"""LAMB: Adam without bias correction, with steps scaled to the norm of each tensor's weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.engine.rule import Clip, Group
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import EngineOptions
from compiled_optim.tensors import AllReduce, Number, Tensors, materialize

MAX_WEIGHT_NORM = 10.0


class Lamb(Optimizer):
    r"""LAMB (You et al., 2019, `arXiv:1904.00962 <https://arxiv.org/abs/1904.00962>`_), as torch_npu computes it.

    .. math::
        m &= \beta_1 m + (1 - \beta_1) g, \qquad v = \beta_2 v + (1 - \beta_2) g^2, \qquad
        u = \frac{m}{\sqrt{v} + \epsilon} + \lambda p \\
        p &= p - lr \cdot \frac{\min(\|p\|, 10)}{\|u\|} \cdot u

    The trust ratio is 1 if either norm is zero. Use it to train with very large batches; with ordinary ones AdamW is
    as good and cheaper.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: learning rate; a float or a tensor of one element.
        betas: decay rates of the averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: the decay :math:`\lambda`.
        adam: use a trust ratio of 1.
        use_global_grad_norm: clip gradients to a global norm of 1 before the update.
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`.

    >>> weight = torch.nn.Parameter(torch.full((4,), 2.0))
    >>> opt = Lamb([weight], lr=0.5, compile=False)
    >>> weight.sum().backward()
    >>> opt.step()
    >>> [round(value, 4) for value in weight.tolist()]
    [1.0, 1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
        use_global_grad_norm: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, adam=adam, maximize=maximize)
        super().__init__(params, {**defaults, "use_global_grad_norm": use_global_grad_norm}, **options)

    def clips(self, group: Group, dtype: torch.dtype) -> list[Clip]:
        unit_norm = [Clip(1.0, eps=0.0)] if group["use_global_grad_norm"] else []
        return [*super().clips(group, dtype), *unit_norm]

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        return {"has_weight_decay": bool(group["weight_decay"] != 0), "use_trust_ratio": not group["adam"]}

    @staticmethod
    def update(
        p: Tensors, g: Tensors, exp_avg: Tensors, exp_avg_sq: Tensors, *,
        lr: Number, beta1: Number, beta2: Number, eps: Number, weight_decay: Number,
        has_weight_decay: bool, use_trust_ratio: bool, all_reduce: AllReduce,
    ) -> None:  # fmt: skip
        u = direction(p, g, exp_avg, exp_avg_sq, beta1, beta2, eps, weight_decay if has_weight_decay else None)
        if use_trust_ratio:
            weights, updates = all_reduce(p.sum_of_squares(), u.sum_of_squares())
            u *= weights.map(partial(trust_ratio, dtype=u[0].dtype), updates)
        p -= lr * u


def direction(
    p: Tensors, g: Tensors, exp_avg: Tensors, exp_avg_sq: Tensors,
    beta1: Number, beta2: Number, eps: Number, weight_decay: Number | None,
) -> Tensors:  # fmt: skip
    """Update the moments, and return Adam's direction without bias correction, with weight decay if it is not None."""
    exp_avg.ema_(g, beta1)  # m = b1 m + (1 - b1) g
    exp_avg_sq.ema_(g * g, beta2)  # v = b2 v + (1 - b2) g²
    u = exp_avg / (exp_avg_sq.sqrt() + eps)
    if weight_decay is not None:
        u += weight_decay * p
    return u


def trust_ratio(weights: Tensor, updates: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor of an update, from the sums of squares of the weights and of the update."""
    weight_norm, update_norm = weights.sqrt(), updates.sqrt()
    ratio = weight_norm.clamp(max=MAX_WEIGHT_NORM) / update_norm
    return materialize(torch.where((weight_norm > 0) & (update_norm > 0), ratio, 1.0).to(dtype))
