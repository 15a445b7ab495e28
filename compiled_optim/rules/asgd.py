"""ASGD: stochastic gradient descent, and an average of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.engine.rule import Group
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import TorchDecayOptions
from compiled_optim.tensors import Number, Tensors


class ASGD(Optimizer):
    r"""Drop-in for :class:`torch.optim.ASGD` (Polyak and Juditsky, 1992, "Acceleration by averaging").

    .. math::
        p &= (1 - \lambda \eta) \, p - \eta g, \qquad a = a + \mu (p - a) \\
        \eta &= \frac{lr}{(1 + \lambda \cdot lr \cdot t)^\alpha}, \qquad \mu = \frac{1}{\max(1, t - t_0)}

    Each step uses the :math:`\eta` and :math:`\mu` of the step before, as torch does. The average is the state ``ax``;
    copy it into the parameters at the end. Use it for convex problems and language models of the AWD-LSTM kind. For
    other networks an average of weights over the last epochs (``torch.optim.swa_utils``) does the same with any
    optimizer.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: learning rate; a float or a tensor of one element.
        lambd: the decay :math:`\lambda`.
        alpha: the exponent of the decay of the learning rate.
        t0: the step after which the average starts; before it ``ax`` is the parameter.
        weight_decay: added to the gradient, times the parameter.
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`; ``foreach`` and ``capturable`` have no effect.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = ASGD([weight], lr=0.5, lambd=0, compile=False)
    >>> weight.sum().backward()
    >>> opt.step()
    >>> weight.tolist(), opt.state[weight]["ax"].tolist()
    ([0.5, 0.5], [0.5, 0.5])
    """

    has_torch_switches = True
    numbers = {"eta": "lr", "mu": 1.0}  # noqa: RUF012

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1e-2,
        lambd: float = 1e-4,
        alpha: float = 0.75,
        t0: float = 1e6,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        **options: Unpack[TorchDecayOptions],
    ) -> None:
        defaults = dict(lr=lr, lambd=lambd, alpha=alpha, t0=t0, weight_decay=weight_decay, maximize=maximize)
        super().__init__(params, defaults, **options)

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        lr, lambd, eta = float(group["lr"]), float(group["lambd"]), group["eta"]
        return {
            "has_weight_decay": bool(group["weight_decay"] != 0),
            "shrink": 1 - lambd * eta,
            "step_size": eta,
            "keep": 1 - group["mu"],
            "eta": lr / (1 + lambd * lr * step) ** group["alpha"],
            "mu": 1 / max(1, step - group["t0"]),
        }

    @staticmethod
    def update(
        p: Tensors, g: Tensors, ax: Tensors, *,
        weight_decay: Number, shrink: Number, step_size: Number, keep: Number, has_weight_decay: bool,
    ) -> None:  # fmt: skip
        if has_weight_decay:
            g = g + weight_decay * p
        p *= shrink  # p = (1 - lambda eta) p
        p -= step_size * g
        ax.ema_(p, keep)  # a = (1 - mu) a + mu p
