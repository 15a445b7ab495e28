"""AdamP: Adam that does not let momentum inflate scale-invariant weights."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.checks import check_not_negative
from compiled_optim.lists import (
    TensorList,
    minus_scaled_,
    moment_scalars,
    moments_,
    plus_scaled,
    settled,
    shifted,
    sum_dtype,
)
from compiled_optim.optimizer import EngineOptions, Optimizer


class AdamP(Optimizer):
    """AdamP (Heo et al., 2020), for networks with normalisation layers.

    Where the gradient is nearly orthogonal to the weights, by row (channel) or by tensor (layer), the weights are
    taken to be scale-invariant: the part of the step along them is removed and weight decay is reduced to ``wd_ratio``.
    Parameters of one dimension are stepped as by Adam. For the options common to all optimizers see
    :class:`~compiled_optim.Optimizer`.

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
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "delta": delta,
            "wd_ratio": wd_ratio,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, **options)

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        check_not_negative("delta value", group["delta"])
        check_not_negative("wd_ratio value", group["wd_ratio"])

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def options(self, group: dict[str, Any]) -> dict[str, bool]:
        return {"nesterov": bool(group["nesterov"])}

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, float]:
        lr = float(group["lr"])
        beta1, beta2 = map(float, group["betas"])
        return {
            "decay": lr * float(group["weight_decay"]),
            "wd_ratio": float(group["wd_ratio"]),
            "delta": float(group["delta"]),
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
        decay: Tensor,
        wd_ratio: Tensor,
        delta: Tensor,
        beta1: Tensor,
        gain1: Tensor,
        beta2: Tensor,
        gain2: Tensor,
        correction: Tensor,
        eps: Tensor,
        step_size: Tensor,
        nesterov: bool,
    ) -> None:
        moments_(exp_avg, exp_avg_sq, grads, beta1, gain1, beta2, gain2)
        root = torch._foreach_mul(torch._foreach_sqrt(exp_avg_sq), correction)
        ahead = plus_scaled(torch._foreach_mul(exp_avg, beta1), grads, gain1) if nesterov else exp_avg
        steps = torch._foreach_div(ahead, shifted(root, eps))
        if params[0].ndim == 1:
            torch._foreach_mul_(params, 1 - decay)  # p *= 1 - lr wd
            minus_scaled_(params, steps, step_size)  # p -= lr / (1 - b1^t) step
            return
        for param, grad, step in zip(params, grads, steps, strict=True):
            along, fires = projection(param, grad, step, delta, eps)
            shrink = 1 - decay * torch.where(fires, wd_ratio, 1.0)  # p *= 1 - lr wd ratio
            param.copy_(param * shrink - step_size * (step - param * along))


def projection(param: Tensor, grad: Tensor, step: Tensor, delta: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """By how much of each row of the parameter its step is to be reduced, and whether it is at all.

    The channel view is tried first, then the layer view; sums over the layer are sums of those over its rows.
    """
    rows, columns = param.shape
    inner, square, grad_square, overlap = (
        (a * b).sum(dim=1, dtype=sum_dtype(a)) for a, b in ((grad, param), (param, param), (grad, grad), (step, param))
    )
    views = [
        (inner, square, grad_square, overlap, columns),
        (inner.sum(), square.sum(), grad_square.sum(), overlap.sum(), rows * columns),
    ]
    fired, alongs = [], []
    for view_inner, view_square, view_grad_square, view_overlap, width in views:
        norm = view_square.sqrt() + eps
        cosine = view_inner.abs() / (view_grad_square.sqrt() + eps) / norm
        fired.append(cosine.max() * width**0.5 < delta)  # cos < delta / sqrt(columns)
        alongs.append((view_overlap / norm / norm).to(param.dtype))  # pn Σ(pn step) = p along
    channel, layer = fired
    zero = torch.zeros_like(alongs[0])
    along = torch.where(channel, alongs[0], torch.where(layer, alongs[1], zero))
    return settled(along).unsqueeze(1), settled(channel | layer)
