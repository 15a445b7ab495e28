"""AdamP: Adam that does not let momentum inflate scale-invariant weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.engine.hyperparameters import check_not_negative
from compiled_optim.engine.rule import Group
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import EngineOptions
from compiled_optim.rules.projection import projection, without
from compiled_optim.tensors import AllReduce, Number, Tensors


class AdamP(Optimizer):
    r"""AdamP (Heo et al., 2020, `arXiv:2006.08217 <https://arxiv.org/abs/2006.08217>`_), for normalised networks.

    With :math:`u` the direction of Adam's step and :math:`\hat p = p / \|p\|`:

    .. math::
        u &= u - \hat p \, (\hat p \cdot u) \quad \text{if } \cos(g, p) < \delta / \sqrt{\dim p} \\
        p &= (1 - lr \cdot \lambda \cdot r) \, p - \frac{lr}{1 - \beta_1^t} \, u

    The condition is tried for the rows of a tensor (its channels), which must all meet it, and then for the tensor as a
    whole. Where it holds, the weights are taken to be scale-invariant and :math:`r` is ``wd_ratio``, else 1. Parameters
    of one dimension are stepped as by AdamW. Without normalisation layers it is AdamW at a higher cost.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: learning rate; a float or a tensor of one element.
        betas: decay rates of the averages of the gradient and of its square.
        eps: added to denominators.
        weight_decay: the decay :math:`\lambda`.
        delta: the threshold of the cosine.
        wd_ratio: the factor of the weight decay of scale-invariant weights.
        nesterov: use Nesterov momentum.
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`.

    >>> weight = torch.nn.Parameter(torch.eye(2))
    >>> opt = AdamP([weight], lr=0.5, compile=False)
    >>> weight.grad = torch.tensor([[0.0, 1.0], [1.0, 0.0]])  # orthogonal to each row
    >>> opt.step()
    >>> weight.tolist()
    [[1.0, -0.5], [-0.5, 1.0]]
    """

    rowwise = True

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, delta=delta, wd_ratio=wd_ratio)
        super().__init__(params, {**defaults, "nesterov": nesterov, "maximize": maximize}, **options)

    def check(self, group: Group) -> None:
        super().check(group)
        check_not_negative("delta value", group["delta"])
        check_not_negative("wd_ratio value", group["wd_ratio"])

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
        return {
            "decay": lr * float(group["weight_decay"]),
            "correction": 1 / math.sqrt(1 - beta2**step),
            "step_size": lr / (1 - beta1**step),
            "nesterov": bool(group["nesterov"]),
        }

    @staticmethod
    def update(
        p: Tensors, g: Tensors, exp_avg: Tensors, exp_avg_sq: Tensors, *,
        decay: Number, wd_ratio: Number, delta: Number, beta1: Number, beta2: Number, correction: Number, eps: Number,
        step_size: Number, nesterov: bool, all_reduce: AllReduce,
    ) -> None:  # fmt: skip
        exp_avg.ema_(g, beta1)  # m = b1 m + (1 - b1) g
        exp_avg_sq.ema_(g * g, beta2)  # v = b2 v + (1 - b2) g²
        momentum = beta1 * exp_avg + (1 - beta1) * g if nesterov else exp_avg
        u = momentum / (exp_avg_sq.sqrt() * correction + eps)
        if not p.has_rows:
            p *= 1 - decay
            p -= step_size * u
            return
        limits = {"delta": delta, "eps": eps, "decay": decay, "wd_ratio": wd_ratio}
        along, shrink = projection(p, g, u, all_reduce, **limits)
        u = u.map(without, p, along)
        p *= shrink
        p -= step_size * u
