"""BertAdam: Adam without bias correction, with clipping and a learning-rate schedule of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.engine.hyperparameters import check_usual
from compiled_optim.engine.rule import Clip, Group
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import RunOptions
from compiled_optim.rules.lamb import direction
from compiled_optim.tensors import Number, Tensors


def _linear(x: float, warmup: float) -> float:
    return max((x - 1) / (warmup - 1), 0.0)


SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "warmup_cosine": lambda x, warmup: 0.5 * (1 + math.cos(math.pi * x)),
    "warmup_constant": lambda x, warmup: 1.0,
    "warmup_linear": _linear,
    "warmup_poly": lambda x, warmup: (1 - x) ** 0.5 if x <= 1 else 0.0,
}
"""The factor of the learning rate after warm-up, by the fraction ``x`` of ``t_total`` that is done."""


class BertAdam(Optimizer):
    r"""BertAdam as in NVIDIA's BERT (Devlin et al., 2018, `arXiv:1810.04805 <https://arxiv.org/abs/1810.04805>`_).

    .. math::
        m &= \beta_1 m + (1 - \beta_1) g, \qquad v = \beta_2 v + (1 - \beta_2) g^2 \\
        p &= p - lr_t \cdot \left( \frac{m}{\sqrt{v} + \epsilon} + \lambda p \right)

    Choose it to reproduce a BERT recipe. For new work use :class:`~compiled_optim.AdamW`, whose bias correction helps
    the first steps, with a scheduler of your own.

    Args:
        params: parameters, named parameters, parameter groups, or a module.
        lr: the peak learning rate; a float or a tensor of one element.
        warmup: the fraction of ``t_total`` over which the learning rate rises linearly; -1 for none.
        t_total: the number of steps of the schedule; -1 keeps the learning rate constant.
        schedule: warmup_linear, warmup_cosine, warmup_constant or warmup_poly.
        b1: decay rate of the average of the gradient.
        b2: decay rate of the average of its square.
        e: added to the denominator.
        weight_decay: the decay :math:`\lambda`.
        max_grad_norm: clip the gradients of each group to this norm, separately for each dtype; -1 does not clip.
        maximize: ascend instead of descend.
        **options: see :class:`~compiled_optim.Optimizer`.

    The step count is saved, so a resumed run continues its schedule.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = BertAdam([weight], lr=0.1, warmup=0.5, t_total=4, compile=False)
    >>> for _ in range(2):
    ...     weight.grad = torch.ones(2)
    ...     opt.step()
    ...     print(opt.get_lr())
    [0.05]
    [0.1]
    """

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1e-3,
        warmup: float = -1,
        t_total: float = -1,
        schedule: str = "warmup_linear",
        b1: float = 0.9,
        b2: float = 0.999,
        e: float = 1e-6,
        weight_decay: float = 0.01,
        max_grad_norm: float = 1.0,
        *,
        maximize: bool = False,
        **options: Unpack[RunOptions],
    ) -> None:
        defaults = dict(lr=lr, warmup=warmup, t_total=t_total, schedule=schedule, b1=b1, b2=b2, e=e)
        decay_and_norm = dict(weight_decay=weight_decay, max_grad_norm=max_grad_norm, maximize=maximize)
        super().__init__(params, {**defaults, **decay_and_norm}, **options)

    def check(self, group: Group) -> None:
        check_usual({**group, "eps": group["e"]})
        if group["schedule"] not in SCHEDULES:
            raise ValueError(f"Invalid schedule parameter: {group['schedule']}")
        if not (0.0 <= group["warmup"] < 1.0 or group["warmup"] == -1):
            raise ValueError(f"Invalid warmup: {group['warmup']}")
        if not (group["t_total"] > 0 or group["t_total"] == -1):
            raise ValueError(f"Invalid t_total value: {group['t_total']}")
        if group["max_grad_norm"] is None or math.isnan(group["max_grad_norm"]):
            raise ValueError(f"Invalid max_grad_norm value: {group['max_grad_norm']}; -1 means no clipping")
        for name in ("b1", "b2"):
            if not 0.0 <= group[name] < 1.0:
                raise ValueError(f"Invalid {name} parameter: {group[name]}")

    def clips(self, group: Group, dtype: torch.dtype) -> list[Clip]:
        return [Clip(group["max_grad_norm"], pool=(id(group), dtype))] if group["max_grad_norm"] > 0 else []

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        return {"lr": scheduled_lr(group, step - 1), "has_weight_decay": bool(group["weight_decay"] != 0)}

    @staticmethod
    def update(
        p: Tensors, g: Tensors, exp_avg: Tensors, exp_avg_sq: Tensors, *,
        lr: Number, b1: Number, b2: Number, e: Number, weight_decay: Number, has_weight_decay: bool,
    ) -> None:  # fmt: skip
        p -= lr * direction(p, g, exp_avg, exp_avg_sq, b1, b2, e, weight_decay if has_weight_decay else None)

    def get_lr(self) -> list[float]:
        """Return the next step's learning rate for each parameter with a gradient; ``[0]`` before the first step."""
        with_grad = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not all(self._state.get(param) for _, param in with_grad):
            return [0]
        return [scheduled_lr(group, int(self._state[param]["step"])) for group, param in with_grad]


def scheduled_lr(group: Group, steps_done: int) -> float:
    """Return a group's learning rate after this many steps."""
    lr = float(group["lr"])
    if group["t_total"] == -1:
        return lr
    x, warmup = steps_done / group["t_total"], group["warmup"]
    return lr * (x / warmup if x < warmup else SCHEDULES[group["schedule"]](x, warmup))
