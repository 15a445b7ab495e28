"""Adam and AdamW, as torch.optim computes them: one rule, with weight decay in the gradient or beside it."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.lists import TensorList, minus_scaled_, moment_scalars, moments_, plus_scaled, shifted
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import TorchOptions


class Adam(Optimizer):
    """Drop-in for :class:`torch.optim.Adam` (Kingma and Ba, 2014).

    Weight decay is added to the gradient, where the second moment rescales it; prefer :class:`~compiled_optim.AdamW`
    if you regularise. ``foreach``, ``fused`` and ``capturable`` are accepted and have no effect. For the options common
    to all optimizers see :class:`~compiled_optim.Optimizer`.

    >>> weight = torch.nn.Parameter(torch.ones(3))
    >>> opt = Adam([weight], lr=0.5, compile=False)
    >>> weight.sum().backward()
    >>> opt.step()
    >>> weight.tolist()
    [0.5, 0.5, 0.5]
    """

    has_torch_switches = True

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults, **options)

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        moments = {"exp_avg": 0.0, "exp_avg_sq": 0.0}
        return {**moments, "max_exp_avg_sq": 0.0} if group["amsgrad"] else moments

    def options(self, group: dict[str, Any]) -> dict[str, bool]:
        decoupled = bool(group["decoupled_weight_decay"])
        return {"decoupled": decoupled, "coupled": not decoupled and bool(group["weight_decay"] != 0)}

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, float]:
        lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
        beta1, beta2 = map(float, group["betas"])
        return {
            "weight_decay": weight_decay,
            "shrink": 1 - lr * weight_decay,
            **moment_scalars(beta1, beta2),
            "correction": 1 / math.sqrt(1 - beta2**step),
            "eps": float(group["eps"]),
            "step_size": lr / (1 - beta1**step),
        }

    @staticmethod
    def update(  # type: ignore[override]
        params: TensorList,
        grads: TensorList,
        *,
        exp_avg: TensorList,
        exp_avg_sq: TensorList,
        max_exp_avg_sq: TensorList | None = None,
        weight_decay: Tensor,
        shrink: Tensor,
        beta1: Tensor,
        gain1: Tensor,
        beta2: Tensor,
        gain2: Tensor,
        correction: Tensor,
        eps: Tensor,
        step_size: Tensor,
        decoupled: bool,
        coupled: bool,
    ) -> None:
        if decoupled:
            torch._foreach_mul_(params, shrink)  # p *= 1 - lr wd
        if coupled:
            grads = plus_scaled(grads, params, weight_decay)  # g += wd p
        moments_(exp_avg, exp_avg_sq, grads, beta1, gain1, beta2, gain2)
        if max_exp_avg_sq is not None:
            torch._foreach_maximum_(max_exp_avg_sq, exp_avg_sq)  # vmax = max(vmax, v)
            exp_avg_sq = max_exp_avg_sq
        root = torch._foreach_mul(torch._foreach_sqrt(exp_avg_sq), correction)
        direction = torch._foreach_div(exp_avg, shifted(root, eps))  # m / (sqrt(v) / sqrt(1 - b2^t) + eps)
        minus_scaled_(params, direction, step_size)  # p -= lr / (1 - b1^t) direction


class AdamW(Adam):
    """Drop-in for :class:`torch.optim.AdamW` (Loshchilov and Hutter, 2017): Adam with decoupled weight decay.

    >>> weight = torch.nn.Parameter(torch.ones(3))
    >>> opt = AdamW([weight], lr=0.5, weight_decay=0.5, compile=False)
    >>> weight.sum().backward()
    >>> opt.step()
    >>> weight.tolist()
    [0.25, 0.25, 0.25]
    """

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            decoupled_weight_decay=True,
            **options,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True
