"""AdamP: Adam that does not let momentum inflate scale-invariant weights."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.checks import check_not_negative
from compiled_optim.lists import (
    TensorList,
    Total,
    minus_scaled_,
    moment_scalars,
    moments_,
    plus_scaled,
    settled,
    shifted,
    sum_dtype,
)
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import EngineOptions


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
        total: Total,
    ) -> None:
        moments_(exp_avg, exp_avg_sq, grads, beta1, gain1, beta2, gain2)
        root = torch._foreach_mul(torch._foreach_sqrt(exp_avg_sq), correction)
        ahead = plus_scaled(torch._foreach_mul(exp_avg, beta1), grads, gain1) if nesterov else exp_avg
        steps = torch._foreach_div(ahead, shifted(root, eps))
        if params[0].ndim == 1:
            torch._foreach_mul_(params, 1 - decay)  # p *= 1 - lr wd
            minus_scaled_(params, steps, step_size)  # p -= lr / (1 - b1^t) step
            return
        channels = [View.of(*tensors) for tensors in zip(params, grads, steps, strict=True)]
        misfits = [(~view.orthogonal(delta, eps)).sum(dtype=view.sums[0].dtype) for view in channels]
        layers = total(*map(list, zip(*(view.added_up() for view in channels), strict=True)), misfits)
        for param, step, channel, *sums, size, misfit in zip(params, steps, channels, *layers, strict=True):
            along, fires = projection(channel, misfit == 0, View(sums, size.sqrt()), delta, eps)
            shrink = 1 - decay * torch.where(fires, wd_ratio, 1.0)  # p *= 1 - lr wd ratio
            param.copy_(param * shrink - step_size * (step - param * along))


class View(NamedTuple):
    """A tensor seen by rows: sums over each row, of g p, p², g² and step p, and the root of its length."""

    sums: list[Tensor]
    root: float | Tensor

    @classmethod
    def of(cls, param: Tensor, grad: Tensor, step: Tensor) -> View:
        """The channel view: as many rows as the tensor has."""
        products = ((grad, param), (param, param), (grad, grad), (step, param))
        return cls([(a * b).sum(dim=1, dtype=sum_dtype(a)) for a, b in products], param.shape[1] ** 0.5)

    def added_up(self) -> list[Tensor]:
        """The sums of the layer view, which has all rows in one, and the number of its elements."""
        return [*(rows.sum() for rows in self.sums), torch.ones_like(self.sums[0]).sum() * self.root**2]

    def orthogonal(self, delta: Tensor, eps: Tensor) -> Tensor:
        """Whether the gradient of each row is nearly orthogonal to its weights."""
        inner, square, grad_square, _ = self.sums
        cosine = inner.abs() / (grad_square.sqrt() + eps) / (square.sqrt() + eps)
        return cosine * self.root < delta  # cos < delta / sqrt(columns)

    def along(self, eps: Tensor) -> Tensor:
        """How often each row's weights are in its step: ``pn Σ(pn step) = p along``."""
        _, square, _, overlap = self.sums
        norm = square.sqrt() + eps
        return overlap / norm / norm


def projection(channel: View, fires: Tensor, layer: View, delta: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """By how much of each row of the parameter its step is to be reduced, and whether it is at all.

    The channel view is tried first, and fires if all its rows do; then the layer view.
    """
    layer_fires = layer.orthogonal(delta, eps)
    along = channel.along(eps)
    along = torch.where(fires, along, torch.where(layer_fires, layer.along(eps), torch.zeros_like(along)))
    return settled(along.to(eps.dtype)).unsqueeze(1), settled(fires | layer_fires)
