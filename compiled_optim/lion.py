"""Lion: the sign of an interpolated momentum, found by a search over programs."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.lists import TensorList, blend_, minus_scaled_, moment_scalars, plus_scaled
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import EngineOptions


class Lion(Optimizer):
    """Lion (Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms"): every element moves by ``lr``.

    ``p -= lr * (sign(b1 * m + (1 - b1) * g) + weight_decay * p)``, then ``m = b2 * m + (1 - b2) * g``. It keeps one
    state where Adam keeps two. Its steps are larger than Adam's: take a learning rate 3 to 10 times smaller than
    AdamW's, and a weight decay as many times larger. With small batches the sign is mostly noise; there AdamW is
    better. For the options common to all optimizers see :class:`~compiled_optim.Optimizer`.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = Lion([weight], lr=0.25, weight_decay=1.0, compile=False)
    >>> weight.sum().backward()
    >>> opt.step()
    >>> weight.tolist()
    [0.5, 0.5]
    """

    counts_steps = False
    state_names = ("exp_avg",)

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, **options)

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, float]:
        lr, betas = float(group["lr"]), map(float, group["betas"])
        return {"lr": lr, "shrink": 1 - lr * float(group["weight_decay"]), **moment_scalars(*betas)}

    @staticmethod
    def update(  # type: ignore[override]
        params: TensorList, grads: TensorList, *, exp_avg: TensorList,
        lr: Tensor, shrink: Tensor, beta1: Tensor, gain1: Tensor, beta2: Tensor, gain2: Tensor,
    ) -> None:  # fmt: skip
        direction = plus_scaled(torch._foreach_mul(exp_avg, beta1), grads, gain1)  # c = b1 m + (1 - b1) g
        torch._foreach_mul_(params, shrink)  # p *= 1 - lr wd
        minus_scaled_(params, torch._foreach_sign(direction), lr)  # p -= lr sign(c)
        blend_(exp_avg, beta2, grads, gain2)  # m = b2 m + (1 - b2) g
