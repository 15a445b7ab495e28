"""SGDP: SGD that does not let momentum inflate scale-invariant weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.engine.hyperparameters import check_not_negative, check_usual
from compiled_optim.engine.rule import Group
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import EngineOptions
from compiled_optim.rules.projection import projection, without
from compiled_optim.tensors import AllReduce, Number, Tensors


class SGDP(Optimizer):
    r"""Drop-in for ``adamp.SGDP`` (Heo et al., 2020, `arXiv:2006.08217 <https://arxiv.org/abs/2006.08217>`_).

    With :math:`\hat p = p / \|p\|`:

    .. math::
        b &= \mu b + (1 - \tau) g, \qquad u = g + \mu b \text{ with Nesterov, else } b \\
        u &= u - \hat p \, (\hat p \cdot u) \quad \text{if } \cos(g, p) < \delta / \sqrt{\dim p} \\
        p &= \left( 1 - \frac{lr \cdot \lambda \cdot r}{1 - \mu} \right) p - lr \cdot u

    The condition is tried as in :class:`~compiled_optim.AdamP`: for the rows of a tensor, then for the tensor as a
    whole. Where it holds, :math:`r` is ``wd_ratio``, else 1. Parameters of one dimension have no projection. As in the
    package, the momentum itself is projected unless ``nesterov`` is set.

    Use it for convolutional networks with normalisation layers, where :class:`~compiled_optim.SGD` would be used.
    Without such layers it is SGD at a higher cost.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: learning rate; a float or a tensor of one element.
        momentum: :math:`\mu`.
        dampening: :math:`\tau`.
        weight_decay: the decay :math:`\lambda`.
        nesterov: use Nesterov momentum.
        eps: added to denominators.
        delta: the threshold of the cosine.
        wd_ratio: the factor of the weight decay of scale-invariant weights.
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`.

    >>> weight = torch.nn.Parameter(torch.eye(2))
    >>> opt = SGDP([weight], lr=0.5, compile=False)
    >>> weight.grad = torch.tensor([[0.0, 1.0], [1.0, 0.0]])  # orthogonal to each row
    >>> opt.step()
    >>> weight.tolist()
    [[1.0, -0.5], [-0.5, 1.0]]
    """

    counts_steps = False
    rowwise = True

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        eps: float = 1e-8,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        *,
        maximize: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        defaults = dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov)
        defaults |= dict(eps=eps, delta=delta, wd_ratio=wd_ratio, maximize=maximize)
        super().__init__(params, defaults, **options)

    def check(self, group: Group) -> None:
        check_usual(group)
        if not 0.0 <= group["momentum"] < 1.0:
            raise ValueError(f"Invalid momentum value: {group['momentum']}")
        check_not_negative("delta value", group["delta"])
        check_not_negative("wd_ratio value", group["wd_ratio"])

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        mu = float(group["momentum"])
        return {
            "mu": mu,
            "gain": 1 - float(group["dampening"]),
            "decay": float(group["lr"]) * float(group["weight_decay"]) / (1 - mu),
            "nesterov": bool(group["nesterov"]),
        }

    @staticmethod
    def update(
        p: Tensors, g: Tensors, momentum: Tensors, *,
        lr: Number, mu: Number, gain: Number, decay: Number, wd_ratio: Number, delta: Number, eps: Number,
        nesterov: bool, all_reduce: AllReduce,
    ) -> None:  # fmt: skip
        momentum *= mu
        momentum.add_(g, gain)  # b = mu b + (1 - dampening) g
        u = g + mu * momentum if nesterov else momentum
        if p[0].ndim == 1:
            p *= 1 - decay
            p -= lr * u
            return
        limits = {"delta": delta, "eps": eps, "decay": decay, "wd_ratio": wd_ratio}
        along, shrink = projection(p, g, u, all_reduce, **limits)
        u = u.map(without, p, along)
        if not nesterov:
            momentum.copy_(u)
        p *= shrink
        p -= lr * u
