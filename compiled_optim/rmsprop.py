"""RMSprop, as torch.optim.RMSprop computes it, and the variant of TensorFlow."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.checks import check_lr, check_not_negative
from compiled_optim.lists import TensorList, approach_, blend_, minus_scaled_, plus_scaled, shifted
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import EngineOptions, TorchOptions


def variance(square_avg: TensorList, grad_avg: TensorList | None, grads: TensorList, gain: Tensor) -> TensorList:
    """The mean square, or less the squared mean if that is kept, which is updated here."""
    if grad_avg is None:
        return square_avg
    approach_(grad_avg, grads, gain)  # a += (1 - alpha) (g - a)
    return torch._foreach_sub(square_avg, torch._foreach_mul(grad_avg, grad_avg))  # s - a²


class RMSprop(Optimizer):
    """Drop-in for :class:`torch.optim.RMSprop` (Hinton, 2012).

    ``foreach``, ``fused`` and ``capturable`` are accepted and have no effect.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = RMSprop([weight], lr=0.01, compile=False)
    >>> weight.sum().backward()
    >>> opt.step()
    >>> [round(value, 4) for value in weight.tolist()]
    [0.9, 0.9]
    """

    has_torch_switches = True

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "centered": centered,
            "maximize": maximize,
        }
        super().__init__(params, defaults, **options)

    def check(self, group: dict[str, Any]) -> None:
        check_lr(group["lr"])
        check_not_negative("epsilon value", group["eps"])
        check_not_negative("momentum value", group["momentum"])
        check_not_negative("weight_decay value", group["weight_decay"])
        check_not_negative("alpha value", group["alpha"])

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        names = ["square_avg"] + ["momentum_buffer"] * (group["momentum"] > 0) + ["grad_avg"] * bool(group["centered"])
        return dict.fromkeys(names, 0.0)

    def options(self, group: dict[str, Any]) -> dict[str, bool]:
        return {"decays": bool(group["weight_decay"] != 0)}

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, float]:
        alpha = float(group["alpha"])
        return {
            "lr": float(group["lr"]),
            "alpha": alpha,
            "gain": 1 - alpha,
            "eps": float(group["eps"]),
            "weight_decay": float(group["weight_decay"]),
            "momentum": float(group["momentum"]),
        }

    @staticmethod
    def update(  # type: ignore[override]
        params: TensorList,
        grads: TensorList,
        *,
        square_avg: TensorList,
        momentum_buffer: TensorList | None = None,
        grad_avg: TensorList | None = None,
        lr: Tensor,
        alpha: Tensor,
        gain: Tensor,
        eps: Tensor,
        weight_decay: Tensor,
        momentum: Tensor,
        decays: bool,
    ) -> None:
        if decays:
            grads = plus_scaled(grads, params, weight_decay)  # g += wd p
        blend_(square_avg, alpha, torch._foreach_mul(grads, grads), gain)  # s = alpha s + (1 - alpha) g²
        root = torch._foreach_sqrt(variance(square_avg, grad_avg, grads, gain))
        direction: TensorList = torch._foreach_div(grads, shifted(root, eps))  # g / (sqrt(s) + eps)
        if momentum_buffer is not None:
            torch._foreach_mul_(momentum_buffer, momentum)
            torch._foreach_add_(momentum_buffer, direction)  # buf = momentum buf + direction
            direction = momentum_buffer
        minus_scaled_(params, direction, lr)  # p -= lr direction


class RMSpropTF(RMSprop):
    """RMSprop as TensorFlow has it: the average of squares starts at one and epsilon is inside the root.

    Choose it to train a network with the hyperparameters published for TensorFlow (EfficientNet, MobileNet).
    ``decoupled_decay`` takes ``p *= 1 - weight_decay``, not times lr; ``lr_in_momentum`` folds lr into the buffer.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = RMSpropTF([weight], lr=0.1, compile=False)
    >>> weight.sum().backward()
    >>> opt.step()
    >>> [round(value, 4) for value in weight.tolist()]
    [0.9, 0.9]
    """

    has_torch_switches = False

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.9,
        eps: float = 1e-10,
        weight_decay: float = 0,
        momentum: float = 0.0,
        centered: bool = False,
        decoupled_decay: bool = False,
        lr_in_momentum: bool = True,
        *,
        maximize: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "centered": centered,
            "decoupled_decay": decoupled_decay,
            "lr_in_momentum": lr_in_momentum,
            "maximize": maximize,
        }
        Optimizer.__init__(self, params, defaults, **options)

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        return {**super().initial_state(group), "square_avg": 1.0}

    def options(self, group: dict[str, Any]) -> dict[str, bool]:
        decays, decoupled = bool(group["weight_decay"] != 0), bool(group["decoupled_decay"])
        return {
            "coupled": decays and not decoupled,
            "decoupled": decays and decoupled,
            "lr_in_momentum": bool(group["lr_in_momentum"]),
        }

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, float]:
        return {**super().scalars(group, step), "shrink": 1 - float(group["weight_decay"])}

    @staticmethod
    def update(  # type: ignore[override]
        params: TensorList,
        grads: TensorList,
        *,
        square_avg: TensorList,
        momentum_buffer: TensorList | None = None,
        grad_avg: TensorList | None = None,
        lr: Tensor,
        alpha: Tensor,
        gain: Tensor,
        eps: Tensor,
        weight_decay: Tensor,
        momentum: Tensor,
        shrink: Tensor,
        coupled: bool,
        decoupled: bool,
        lr_in_momentum: bool,
    ) -> None:
        if coupled:
            grads = plus_scaled(grads, params, weight_decay)  # g += wd p
        if decoupled:
            torch._foreach_mul_(params, shrink)  # p *= 1 - wd
        approach_(square_avg, torch._foreach_mul(grads, grads), gain)  # s += (1 - alpha) (g² - s)
        root = torch._foreach_sqrt(shifted(variance(square_avg, grad_avg, grads, gain), eps))
        direction: TensorList = torch._foreach_div(grads, root)  # g / sqrt(s + eps)
        if momentum_buffer is None or lr_in_momentum:
            direction = torch._foreach_mul(direction, lr)
        if momentum_buffer is not None:
            torch._foreach_mul_(momentum_buffer, momentum)
            torch._foreach_add_(momentum_buffer, direction)  # buf = momentum buf + [lr] direction
            direction = momentum_buffer if lr_in_momentum else torch._foreach_mul(momentum_buffer, lr)
        torch._foreach_sub_(params, direction)  # p -= [lr] direction or buf
