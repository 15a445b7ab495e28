"""Stochastic gradient descent with momentum, as torch.optim.SGD computes it."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.checks import check_lr, check_not_negative
from compiled_optim.errors import NesterovError
from compiled_optim.lists import TensorList, blend_, minus_scaled_, plus_scaled
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import TorchOptions


class SGD(Optimizer):
    """Drop-in for :class:`torch.optim.SGD`.

    With ``d = g + weight_decay * p``, the buffer is ``d`` on a parameter's first step and
    ``momentum * buffer + (1 - dampening) * d`` after that; the parameter moves by ``-lr`` times the buffer, or with
    Nesterov by ``-lr * (d + momentum * buffer)``. ``foreach``, ``fused`` and ``capturable`` are accepted and have no
    effect. For the options common to all optimizers see :class:`~compiled_optim.Optimizer`.

    >>> weight = torch.nn.Parameter(torch.ones(3))
    >>> opt = SGD([weight], lr=0.1, compile=False)
    >>> weight.sum().backward()
    >>> opt.step()
    >>> weight.tolist()
    [0.8999999761581421, 0.8999999761581421, 0.8999999761581421]
    """

    counts_steps = False
    has_torch_switches = True

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
        **options: Unpack[TorchOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, **options)

    def check(self, group: dict[str, Any]) -> None:
        check_lr(group["lr"])
        check_not_negative("momentum value", group["momentum"])
        check_not_negative("weight_decay value", group["weight_decay"])
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise NesterovError("Nesterov momentum requires a momentum and zero dampening")

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        return {"momentum_buffer": 0.0} if group["momentum"] != 0 else {}

    def options(self, group: dict[str, Any]) -> dict[str, bool]:
        return {"decays": bool(group["weight_decay"] != 0), "nesterov": bool(group["nesterov"])}

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, float]:
        return {
            "lr": float(group["lr"]),
            "momentum": float(group["momentum"]),
            "gain": 1.0 - float(group["dampening"]) if step > 1 else 1.0,
            "weight_decay": float(group["weight_decay"]),
        }

    @staticmethod
    def update(  # type: ignore[override]
        params: TensorList,
        grads: TensorList,
        *,
        momentum_buffer: TensorList | None = None,
        lr: Tensor,
        momentum: Tensor,
        gain: Tensor,
        weight_decay: Tensor,
        decays: bool,
        nesterov: bool,
    ) -> None:
        if decays:
            grads = plus_scaled(grads, params, weight_decay)  # d = g + wd p
        if momentum_buffer is not None:
            blend_(momentum_buffer, momentum, grads, gain)  # buf = momentum buf + (1 - dampening) d
            # d = d + momentum buf, or buf
            grads = plus_scaled(grads, momentum_buffer, momentum) if nesterov else momentum_buffer
        minus_scaled_(params, grads, lr)  # p -= lr d
