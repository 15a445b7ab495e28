"""RMSprop, and the variant of TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.engine.hyperparameters import check_not_negative, check_usual
from compiled_optim.engine.rule import Group
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import EngineOptions, TorchDecayOptions
from compiled_optim.tensors import Number, Tensors


class RMSprop(Optimizer):
    r"""Drop-in for :class:`torch.optim.RMSprop` (Hinton, 2012, lecture 6e of "Neural Networks for Machine Learning").

    .. math::
        s &= \alpha s + (1 - \alpha) g^2, \qquad d = \frac{g}{\sqrt{s} + \epsilon} \\
        b &= \mu b + d, \qquad p = p - lr \cdot b

    Without momentum, :math:`p = p - lr \cdot d`. With ``centered``, :math:`s` is reduced by the square of the average
    gradient. Use it where a recipe asks for it, mostly in reinforcement learning; else
    :class:`~compiled_optim.AdamW` is the better start.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: learning rate; a float or a tensor of one element.
        alpha: decay rate of the average of squares.
        eps: added to the denominator.
        weight_decay: added to the gradient, times the parameter.
        momentum: :math:`\mu`; 0 keeps no buffer.
        centered: divide by an estimate of the standard deviation.
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`; ``foreach`` and ``capturable`` have no effect.

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
        **options: Unpack[TorchDecayOptions],
    ) -> None:
        defaults = dict(lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum, centered=centered)
        super().__init__(params, {**defaults, "maximize": maximize}, **options)

    def check(self, group: Group) -> None:
        check_usual(group)
        check_not_negative("momentum value", group["momentum"])
        check_not_negative("alpha value", group["alpha"])

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        return {
            "momentum_buffer": group["momentum"] > 0,
            "grad_avg": bool(group["centered"]),
            "has_weight_decay": bool(group["weight_decay"] != 0),
        }

    @staticmethod
    def update(
        p: Tensors, g: Tensors, square_avg: Tensors, momentum_buffer: Tensors | None = None,
        grad_avg: Tensors | None = None, *,
        lr: Number, alpha: Number, eps: Number, weight_decay: Number, momentum: Number, has_weight_decay: bool,
    ) -> None:  # fmt: skip
        if has_weight_decay:
            g = g + weight_decay * p
        square_avg.ema_(g * g, alpha)  # s = alpha s + (1 - alpha) g²
        direction = g / (variance(square_avg, grad_avg, g, alpha).sqrt() + eps)
        if momentum_buffer is not None:
            momentum_buffer *= momentum
            momentum_buffer += direction  # b = momentum b + d
            direction = momentum_buffer
        p -= lr * direction


class RMSpropTF(RMSprop):
    r"""RMSprop as TensorFlow has it: the average of squares starts at one and epsilon is inside the root.

    .. math::
        s &= s + (1 - \alpha) (g^2 - s), \qquad d = \frac{g}{\sqrt{s + \epsilon}} \\
        b &= \mu b + lr \cdot d, \qquad p = p - b

    Choose it to train a network with hyperparameters published for TensorFlow (EfficientNet, MobileNet); else use
    :class:`~compiled_optim.RMSprop`.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: learning rate; a float or a tensor of one element.
        alpha: decay rate of the average of squares.
        eps: added under the root.
        weight_decay: added to the gradient, times the parameter.
        momentum: :math:`\mu`; 0 keeps no buffer.
        centered: divide by an estimate of the standard deviation.
        decoupled_decay: decay by ``p *= 1 - weight_decay`` instead, not times lr.
        lr_in_momentum: False takes ``b = momentum * b + d`` and ``p -= lr * b``.
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = RMSpropTF([weight], lr=0.1, compile=False)
    >>> weight.sum().backward()
    >>> opt.step()
    >>> [round(value, 4) for value in weight.tolist()]
    [0.9, 0.9]
    """

    has_torch_switches = False
    initial_values = {"square_avg": 1.0}  # noqa: RUF012

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
        defaults = dict(lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum, centered=centered)
        flags = dict(decoupled_decay=decoupled_decay, lr_in_momentum=lr_in_momentum, maximize=maximize)
        Optimizer.__init__(self, params, {**defaults, **flags}, **options)

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        has_decay, decoupled = bool(group["weight_decay"] != 0), bool(group["decoupled_decay"])
        return {
            "momentum_buffer": group["momentum"] > 0,
            "grad_avg": bool(group["centered"]),
            "coupled_decay": has_decay and not decoupled,
            "decoupled_decay": has_decay and decoupled,
            "lr_in_momentum": bool(group["lr_in_momentum"]),
            "shrink": 1 - float(group["weight_decay"]),
        }

    @staticmethod
    def update(  # type: ignore[override]
        p: Tensors, g: Tensors, square_avg: Tensors, momentum_buffer: Tensors | None = None,
        grad_avg: Tensors | None = None, *,
        lr: Number, alpha: Number, eps: Number, weight_decay: Number, momentum: Number, shrink: Number,
        coupled_decay: bool, decoupled_decay: bool, lr_in_momentum: bool,
    ) -> None:  # fmt: skip
        if coupled_decay:
            g = g + weight_decay * p
        if decoupled_decay:
            p *= shrink  # p = (1 - wd) p
        square_avg.lerp_(g * g, 1 - alpha)  # s += (1 - alpha) (g² - s)
        direction = g / (variance(square_avg, grad_avg, g, alpha) + eps).sqrt()
        if momentum_buffer is None or lr_in_momentum:
            direction = lr * direction
        if momentum_buffer is not None:
            momentum_buffer *= momentum
            momentum_buffer += direction  # b = momentum b + [lr] d
            direction = momentum_buffer if lr_in_momentum else lr * momentum_buffer
        p -= direction


def variance(square_avg: Tensors, grad_avg: Tensors | None, g: Tensors, alpha: Number) -> Tensors:
    """Return the mean square, less the squared mean if that is kept, which is updated here."""
    if grad_avg is None:
        return square_avg
    grad_avg.lerp_(g, 1 - alpha)  # a += (1 - alpha) (g - a)
    return square_avg - grad_avg * grad_avg
