"""Lars: SGD with a learning rate for each layer, for large batches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.engine.hyperparameters import check_lr, check_not_negative, check_usual
from compiled_optim.engine.rule import Group
from compiled_optim.errors import NesterovError
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import EngineOptions
from compiled_optim.tensors import AllReduce, Number, Tensors, materialize


class Lars(Optimizer):
    r"""LARS (You et al., 2017, `arXiv:1708.03888 <https://arxiv.org/abs/1708.03888>`_), with the arguments of timm's.

    .. math::
        r &= \frac{\eta \|p\|}{\|g\| + \lambda \|p\| + \epsilon}
            \text{, or 1 if one of both norms is zero} \\
        d &= r \, (g + \lambda p), \qquad b = d \text{ in the first step, then } \mu b + (1 - \tau) d \\
        p &= p - lr \cdot (d + \mu b \text{ with Nesterov, else } b)

    Use it to train convolutional networks with batches of several thousand images, where :class:`~compiled_optim.SGD`
    diverges. With small batches it has no advantage; for transformers use :class:`~compiled_optim.Lamb`. The learning
    rate is much larger than that of SGD. As in timm, and unlike in the paper, it is not a factor of the momentum.

    Groups with ``weight_decay=0`` are stepped as by SGD, as recipes do with biases and normalisation layers.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: learning rate; a float or a tensor of one element.
        momentum: :math:`\mu`; 0 keeps no state.
        dampening: :math:`\tau`.
        weight_decay: :math:`\lambda`, added to the gradient, times the parameter.
        nesterov: use Nesterov momentum.
        trust_coeff: the trust coefficient :math:`\eta`.
        eps: added to the denominator of :math:`r`.
        trust_clip: use at most the learning rate of SGD: :math:`r = \min(r / lr, 1)` (LARC).
        always_adapt: also adapt the learning rate of groups with ``weight_decay=0``.
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`.

    >>> weight = torch.nn.Parameter(torch.full((4,), 3.0))  # of norm 6
    >>> opt = Lars([weight], lr=1.0, trust_coeff=0.5, eps=0.0, always_adapt=True, compile=False)
    >>> weight.grad = torch.full((4,), 100.0)
    >>> opt.step()
    >>> weight.tolist()  # it has moved by half of its norm
    [1.5, 1.5, 1.5, 1.5]
    """

    counts_steps = False

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1.0,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        trust_coeff: float = 0.001,
        eps: float = 1e-8,
        trust_clip: bool = False,
        always_adapt: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        defaults = dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov)
        defaults |= dict(trust_coeff=trust_coeff, eps=eps, trust_clip=trust_clip, always_adapt=always_adapt)
        super().__init__(params, {**defaults, "maximize": maximize}, **options)

    def check(self, group: Group) -> None:
        check_usual(group)
        check_lr(group["lr"])
        check_not_negative("momentum value", group["momentum"])
        check_not_negative("trust_coeff value", group["trust_coeff"])
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise NesterovError("Nesterov momentum requires a momentum and zero dampening")

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        return {
            "momentum_buffer": group["momentum"] != 0,
            "adapts": bool(group["weight_decay"] != 0 or group["always_adapt"]),
            "nesterov": bool(group["nesterov"]),
            "trust_clip": bool(group["trust_clip"]),
            "gain": 1.0 - float(group["dampening"]) if step > 1 else 1.0,
        }

    @staticmethod
    def update(
        p: Tensors, g: Tensors, momentum_buffer: Tensors | None = None, *,
        lr: Number, momentum: Number, gain: Number, weight_decay: Number, trust_coeff: Number, eps: Number,
        adapts: bool, trust_clip: bool, nesterov: bool, all_reduce: AllReduce,
    ) -> None:  # fmt: skip
        d = g
        if adapts:
            weights, grads = all_reduce(p.sum_of_squares(), g.sum_of_squares())
            ratio = partial(trust_ratio, p[0].dtype, trust_coeff, weight_decay, eps, lr if trust_clip else None)
            d = (g + weight_decay * p) * weights.map(ratio, grads)
        if momentum_buffer is not None:
            momentum_buffer *= momentum
            momentum_buffer.add_(d, gain)  # b = momentum b + (1 - dampening) d
            d = d + momentum * momentum_buffer if nesterov else momentum_buffer
        p -= lr * d


def trust_ratio(
    dtype: torch.dtype, coeff: Number, weight_decay: Number, eps: Number, lr: Number | None,
    weights: Tensor, grads: Tensor,
) -> Tensor:  # fmt: skip
    """Return the factor of a gradient, from the sums of squares of the weights and of the gradient."""
    weight_norm, grad_norm = weights.sqrt(), grads.sqrt()
    ratio = coeff * weight_norm / (grad_norm + weight_decay * weight_norm + eps)
    ratio = torch.where((weight_norm > 0) & (grad_norm > 0), ratio, 1.0)
    if lr is not None:
        ratio = (ratio / lr).clamp(max=1.0)
    return materialize(ratio.to(dtype))
