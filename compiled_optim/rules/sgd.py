"""SGD: stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.engine.hyperparameters import check_lr, check_not_negative
from compiled_optim.engine.rule import Group
from compiled_optim.errors import NesterovError
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import TorchDecayOptions
from compiled_optim.tensors import Number, Tensors


class SGD(Optimizer):
    r"""Drop-in for :class:`torch.optim.SGD` (Nesterov momentum: Sutskever et al., 2013).

    .. math::
        d &= g + \lambda p \\
        b &= d \text{ in the first step, then } \mu b + (1 - \tau) d \\
        p &= p - lr \cdot (d + \mu b \text{ with Nesterov, else } b)

    The usual choice for convolutional networks. It needs a tuned learning rate and a schedule; for transformers prefer
    :class:`~compiled_optim.AdamW`.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: learning rate; a float or a tensor of one element.
        momentum: :math:`\mu`; 0 keeps no state.
        dampening: :math:`\tau`.
        weight_decay: :math:`\lambda`, added to the gradient, times the parameter.
        nesterov: use Nesterov momentum.
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`; ``foreach`` and ``capturable`` have no effect.

    >>> weight = torch.nn.Parameter(torch.ones(3))
    >>> opt = SGD([weight], lr=0.1, compile=False)
    >>> weight.sum().backward()
    >>> opt.step()
    >>> weight.tolist()
    [0.8999999761581421, 0.8999999761581421, 0.8999999761581421]
    """

    counts_steps = False
    has_torch_switches = True
    sparse_alternative = "torch.optim.SGD"

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[TorchDecayOptions],
    ) -> None:
        defaults = dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov)
        super().__init__(params, {**defaults, "maximize": maximize}, **options)

    def check(self, group: Group) -> None:
        check_lr(group["lr"])
        check_not_negative("momentum value", group["momentum"])
        check_not_negative("weight_decay value", group["weight_decay"])
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise NesterovError("Nesterov momentum requires a momentum and zero dampening")

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        return {
            "momentum_buffer": group["momentum"] != 0,
            "has_weight_decay": bool(group["weight_decay"] != 0),
            "nesterov": bool(group["nesterov"]),
            "gain": 1.0 - float(group["dampening"]) if step > 1 else 1.0,
        }

    @staticmethod
    def update(
        p: Tensors, g: Tensors, momentum_buffer: Tensors | None = None, *,
        lr: Number, momentum: Number, gain: Number, weight_decay: Number, has_weight_decay: bool, nesterov: bool,
    ) -> None:  # fmt: skip
        d = g + weight_decay * p if has_weight_decay else g
        if momentum_buffer is not None:
            momentum_buffer *= momentum
            momentum_buffer.add_(d, gain)  # b = momentum b + (1 - dampening) d
            d = d + momentum * momentum_buffer if nesterov else momentum_buffer
        p -= lr * d
