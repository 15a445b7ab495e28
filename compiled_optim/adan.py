"""Adan: Adam with Nesterov momentum, estimated from how gradients change from step to step."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.checks import check_usual
from compiled_optim.lists import TensorList, blend_, moment_scalars, plus_scaled, shifted
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import EngineOptions


class Adan(Optimizer):
    """Adan (Xie et al., 2022, "Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models").

    With ``d`` the gradient's difference to the one before (0 on the first step) and ``m``, ``v``, ``n`` the running
    averages of ``g``, of ``d`` and of ``(g + b2 * d)²``, each divided by ``1 - b^t``:
    ``p = (p - lr * (m + b2 * v) / (sqrt(n) + eps)) / (1 + lr * weight_decay)``. ``betas`` are the shares that are kept,
    one minus the paper's. It stands learning rates 5 to 10 times those of AdamW, and keeps four states where that keeps
    two: not for where memory is short. For the options common to all optimizers see
    :class:`~compiled_optim.Optimizer`.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = Adan([weight], lr=0.5, compile=False)
    >>> weight.sum().backward()
    >>> opt.step()
    >>> weight.tolist()
    [0.5, 0.5]
    """

    state_names = ("exp_avg", "exp_avg_diff", "exp_avg_sq", "previous_grad")

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
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, **options)

    def check(self, group: dict[str, Any]) -> None:
        check_usual(group, betas=3)

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, float]:
        lr, (beta1, beta2, beta3) = float(group["lr"]), map(float, group["betas"])
        return {
            **moment_scalars(beta1, beta2, beta3),
            **{"differs": float(step > 1), "correction": 1 / math.sqrt(1 - beta3**step), "eps": float(group["eps"])},
            **{"step_size": lr / (1 - beta1**step), "ahead": lr * beta2 / (1 - beta2**step)},
            "shrink": 1 / (1 + lr * float(group["weight_decay"])),
        }

    @staticmethod
    def update(  # type: ignore[override]
        params: TensorList, grads: TensorList, *,
        exp_avg: TensorList, exp_avg_diff: TensorList, exp_avg_sq: TensorList, previous_grad: TensorList,
        beta1: Tensor, gain1: Tensor, beta2: Tensor, gain2: Tensor, beta3: Tensor, gain3: Tensor,
        differs: Tensor, correction: Tensor, eps: Tensor, step_size: Tensor, ahead: Tensor, shrink: Tensor,
    ) -> None:  # fmt: skip
        diff = torch._foreach_mul(torch._foreach_sub(grads, previous_grad), differs)  # d = g - g', 0 at first
        blend_(exp_avg, beta1, grads, gain1)  # m = b1 m + (1 - b1) g
        blend_(exp_avg_diff, beta2, diff, gain2)  # v = b2 v + (1 - b2) d
        expected = plus_scaled(grads, diff, beta2)
        blend_(exp_avg_sq, beta3, torch._foreach_mul(expected, expected), gain3)  # n = b3 n + (1 - b3) (g + b2 d)²
        root = shifted(torch._foreach_mul(torch._foreach_sqrt(exp_avg_sq), correction), eps)
        step = plus_scaled(torch._foreach_mul(exp_avg, step_size), exp_avg_diff, ahead)  # lr (m + b2 v), corrected
        torch._foreach_sub_(params, torch._foreach_div(step, root))  # p -= lr (m + b2 v) / (sqrt(n) + eps)
        torch._foreach_mul_(params, shrink)  # p /= 1 + lr wd
        torch._foreach_copy_(previous_grad, grads)
