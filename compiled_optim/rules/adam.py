"""Adam and AdamW: one rule, with weight decay in the gradient or decoupled from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.engine.rule import Group, Rule
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import TorchOptions
from compiled_optim.tensors import Number, Tensors


class AdamFormula(Rule):
    """The formula of Adam and AdamW, also for groups of an optimizer with several rules."""

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
        beta1, beta2 = map(float, group["betas"])
        return {
            "max_exp_avg_sq": group["amsgrad"],
            "coupled_weight_decay": weight_decay != 0 and not group["decoupled_weight_decay"],
            "shrink": 1 - lr * weight_decay,
            "correction": 1 / math.sqrt(1 - beta2**step),
            "step_size": lr / (1 - beta1**step),
        }

    @staticmethod
    def update(
        p: Tensors, g: Tensors, exp_avg: Tensors, exp_avg_sq: Tensors, max_exp_avg_sq: Tensors | None = None, *,
        weight_decay: Number, shrink: Number, beta1: Number, beta2: Number, correction: Number, eps: Number,
        step_size: Number, decoupled_weight_decay: bool, coupled_weight_decay: bool,
    ) -> None:  # fmt: skip
        if decoupled_weight_decay:
            p *= shrink  # p = (1 - lr wd) p
        if coupled_weight_decay:
            g = g + weight_decay * p
        exp_avg.ema_(g, beta1)  # m = b1 m + (1 - b1) g
        exp_avg_sq.ema_(g * g, beta2)  # v = b2 v + (1 - b2) g²
        v = exp_avg_sq if max_exp_avg_sq is None else max_exp_avg_sq.maximum_(exp_avg_sq)
        p -= step_size * (exp_avg / (v.sqrt() * correction + eps))


class Adam(AdamFormula, Optimizer):
    r"""Drop-in for :class:`torch.optim.Adam` (Kingma and Ba, 2014, `arXiv:1412.6980 <https://arxiv.org/abs/1412.6980>`_).

    .. math::
        m &= \beta_1 m + (1 - \beta_1) g, \qquad v = \beta_2 v + (1 - \beta_2) g^2 \\
        p &= p - \frac{lr}{1 - \beta_1^t} \cdot \frac{m}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    Use it where a recipe asks for it. Weight decay is added to the gradient, where the second moment rescales it: to
    regularise, prefer :class:`~compiled_optim.AdamW`.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: learning rate; a float or a tensor of one element.
        betas: decay rates of the averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: added to the gradient, times the parameter.
        amsgrad: divide by the largest second moment so far (Reddi et al., 2018).
        maximize: ascend instead of descend.
        decoupled_weight_decay: decay as :class:`~compiled_optim.AdamW` does.
        **options: see :class:`~compiled_optim.Optimizer`; ``foreach`` and ``capturable`` have no effect.

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
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize)
        super().__init__(params, {**defaults, "decoupled_weight_decay": decoupled_weight_decay}, **options)


class AdamW(Adam):
    r"""Drop-in for :class:`torch.optim.AdamW` (Loshchilov and Hutter, 2017, `arXiv:1711.05101 <https://arxiv.org/abs/1711.05101>`_).

    Adam with decoupled weight decay: first :math:`p = (1 - lr \cdot \lambda) p`, then Adam's step with the plain
    gradient. The usual choice for transformers, and a safe first choice elsewhere. It keeps two states a parameter;
    where memory is short, see :class:`~compiled_optim.Lion`.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: learning rate; a float or a tensor of one element.
        betas: decay rates of the averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: the decay :math:`\lambda`.
        amsgrad: divide by the largest second moment so far (Reddi et al., 2018).
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`; ``foreach`` and ``capturable`` have no effect.

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
        decoupled: Any = {"decoupled_weight_decay": True, "maximize": maximize, **options}
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **decoupled)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True
