"""Rprop: a step size for each element, from the signs of its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.engine.hyperparameters import check_usual
from compiled_optim.engine.rule import Group
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import TorchOptions
from compiled_optim.tensors import Number, Tensors, where


class Rprop(Optimizer):
    r"""Drop-in for :class:`torch.optim.Rprop` (Riedmiller and Braun, 1993, "The RPROP Algorithm").

    With :math:`q` the gradient of the previous step:

    .. math::
        s &= \begin{cases}
            \min(\eta^+ s, s_{max}) & \text{if } g q > 0 \\
            \max(\eta^- s, s_{min}) \text{ and } g = 0 & \text{if } g q < 0
        \end{cases} \\
        p &= p - s \cdot \operatorname{sign}(g), \qquad q = g

    Use it with the gradient of the whole data set. With mini-batches the signs are mostly noise; use
    :class:`~compiled_optim.AdamW` there.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: the initial step size; a float or a tensor of one element. Later changes have no effect.
        etas: the factors :math:`\eta^-` and :math:`\eta^+` of the step size.
        step_sizes: the smallest and the largest step size.
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`; ``foreach`` and ``capturable`` have no effect.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = Rprop([weight], lr=0.25, compile=False)
    >>> weight.sum().backward()
    >>> opt.step()
    >>> opt.step()
    >>> [round(value, 4) for value in weight.tolist()]
    [0.45, 0.45]
    """

    has_torch_switches = True
    initial_values = {"step_size": "lr"}  # noqa: RUF012

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1e-2,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50),
        *,
        maximize: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        super().__init__(params, dict(lr=lr, etas=etas, step_sizes=step_sizes, maximize=maximize), **options)

    def check(self, group: Group) -> None:
        check_usual(group)
        smaller, larger = group["etas"]
        if not 0.0 < smaller < 1.0 < larger:
            raise ValueError(f"Invalid eta values: {smaller}, {larger}")

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        (smaller, larger), (smallest, largest) = group["etas"], group["step_sizes"]
        return {"smaller": smaller, "larger": larger, "smallest": smallest, "largest": largest}

    @staticmethod
    def update(
        p: Tensors, g: Tensors, prev: Tensors, step_size: Tensors, *,
        smaller: Number, larger: Number, smallest: Number, largest: Number,
    ) -> None:  # fmt: skip
        same, opposite = g * prev > 0.0, g * prev < 0.0
        step_size.copy_(where(same, step_size * larger, where(opposite, step_size * smaller, step_size)))
        step_size.clamp_(smallest, largest)
        prev.copy_(where(opposite, 0.0, g))
        p -= prev.sign() * step_size
