"""NAdam: Adam with Nesterov momentum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.engine.hyperparameters import check_not_negative, check_usual
from compiled_optim.engine.numbers import rounded
from compiled_optim.engine.rule import Group
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import TorchOptions
from compiled_optim.tensors import Number, Tensors


class NAdam(Optimizer):
    r"""Drop-in for :class:`torch.optim.NAdam` (Dozat, 2016, "Incorporating Nesterov Momentum into Adam").

    With :math:`\mu_t = \beta_1 (1 - 0.5 \cdot 0.96^{t \psi})`:

    .. math::
        m &= \beta_1 m + (1 - \beta_1) g, \qquad v = \beta_2 v + (1 - \beta_2) g^2 \\
        \hat m &= \frac{\mu_{t+1} \, m}{1 - \prod_{i=1}^{t+1} \mu_i} + \frac{(1 - \mu_t) \, g}{1 - \prod_{i=1}^t \mu_i},
        \qquad p = p - lr \cdot \frac{\hat m}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    It is often a little faster than Adam at the same learning rate, at the same cost. To regularise, set
    ``decoupled_weight_decay``; where recipes name AdamW, use :class:`~compiled_optim.AdamW`.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: learning rate; a float or a tensor of one element.
        betas: decay rates of the averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: added to the gradient, times the parameter.
        momentum_decay: the decay :math:`\psi`.
        decoupled_weight_decay: decay as :class:`~compiled_optim.AdamW` does.
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`; ``foreach`` and ``capturable`` have no effect.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = NAdam([weight], lr=0.5, compile=False)
    >>> weight.sum().backward()
    >>> opt.step()
    >>> [round(value, 4) for value in weight.tolist()]
    [0.4718, 0.4718]
    """

    has_torch_switches = True
    numbers = {"mu_product": 1.0}  # noqa: RUF012

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, momentum_decay=momentum_decay)
        flags = dict(decoupled_weight_decay=decoupled_weight_decay, maximize=maximize)
        super().__init__(params, {**defaults, **flags}, **options)

    def check(self, group: Group) -> None:
        check_usual(group)
        check_not_negative("momentum_decay value", group["momentum_decay"])

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        lr, weight_decay, decay = (float(group[name]) for name in ("lr", "weight_decay", "momentum_decay"))
        beta1, beta2 = map(float, group["betas"])
        mu, next_mu = (beta1 * (1 - 0.5 * 0.96 ** (t * decay)) for t in (step, step + 1))
        mu_product = rounded(group["mu_product"] * rounded(mu))  # as torch, which multiplies two tensors
        return {
            "mu_product": mu_product,
            "coupled_weight_decay": weight_decay != 0 and not group["decoupled_weight_decay"],
            "decoupled_weight_decay": weight_decay != 0 and bool(group["decoupled_weight_decay"]),
            "shrink": 1 - lr * weight_decay,
            "correction": 1 / math.sqrt(1 - beta2**step),
            "momentum_size": lr * next_mu / (1 - mu_product * next_mu),
            "gradient_size": lr * (1 - mu) / (1 - mu_product),
        }

    @staticmethod
    def update(
        p: Tensors, g: Tensors, exp_avg: Tensors, exp_avg_sq: Tensors, *,
        weight_decay: Number, shrink: Number, beta1: Number, beta2: Number, correction: Number, eps: Number,
        momentum_size: Number, gradient_size: Number, coupled_weight_decay: bool, decoupled_weight_decay: bool,
    ) -> None:  # fmt: skip
        if decoupled_weight_decay:
            p *= shrink  # p = (1 - lr wd) p
        if coupled_weight_decay:
            g = g + weight_decay * p
        exp_avg.ema_(g, beta1)  # m = b1 m + (1 - b1) g
        exp_avg_sq.ema_(g * g, beta2)  # v = b2 v + (1 - b2) g²
        p -= (momentum_size * exp_avg + gradient_size * g) / (exp_avg_sq.sqrt() * correction + eps)
