"""Adadelta, as torch.optim.Adadelta computes it."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.checks import check_lr, check_not_negative
from compiled_optim.lists import TensorList, blend_, minus_scaled_, plus_scaled, shifted
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import TorchOptions


class Adadelta(Optimizer):
    """Drop-in for :class:`torch.optim.Adadelta` (Zeiler, 2012): steps scaled by the ratio of two running averages.

    It needs no learning rate to be tuned, and learns slowly; try :class:`~compiled_optim.AdamW` first. ``foreach``,
    ``fused`` and ``capturable`` are accepted and have no effect.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = Adadelta([weight], compile=False)
    >>> weight.sum().backward()
    >>> opt.step()
    >>> [round(value, 5) for value in weight.tolist()]
    [0.99684, 0.99684]
    """

    has_torch_switches = True

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        defaults = {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, **options)

    def check(self, group: dict[str, Any]) -> None:
        check_lr(group["lr"])
        if not 0.0 <= group["rho"] <= 1.0:
            raise ValueError(f"Invalid rho value: {group['rho']}")
        check_not_negative("epsilon value", group["eps"])
        check_not_negative("weight_decay value", group["weight_decay"])

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        return {"square_avg": 0.0, "acc_delta": 0.0}

    def options(self, group: dict[str, Any]) -> dict[str, bool]:
        return {"decays": bool(group["weight_decay"] != 0)}

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, float]:
        rho = float(group["rho"])
        return {
            "lr": float(group["lr"]),
            "rho": rho,
            "gain": 1 - rho,
            "eps": float(group["eps"]),
            "weight_decay": float(group["weight_decay"]),
        }

    @staticmethod
    def update(  # type: ignore[override]
        params: TensorList,
        grads: TensorList,
        *,
        square_avg: TensorList,
        acc_delta: TensorList,
        lr: Tensor,
        rho: Tensor,
        gain: Tensor,
        eps: Tensor,
        weight_decay: Tensor,
        decays: bool,
    ) -> None:
        if decays:
            grads = plus_scaled(grads, params, weight_decay)  # g += wd p
        blend_(square_avg, rho, torch._foreach_mul(grads, grads), gain)  # s = rho s + (1 - rho) g²
        delta = torch._foreach_sqrt(torch._foreach_div(shifted(acc_delta, eps), shifted(square_avg, eps)))
        delta = torch._foreach_mul(delta, grads)  # d = sqrt(a + eps) / sqrt(s + eps) g
        blend_(acc_delta, rho, torch._foreach_mul(delta, delta), gain)  # a = rho a + (1 - rho) d²
        minus_scaled_(params, delta, lr)  # p -= lr d
