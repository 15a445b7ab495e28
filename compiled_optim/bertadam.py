"""BertAdam: Adam without bias correction, with clipping and a learning-rate schedule of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.checks import check_lr, check_not_negative
from compiled_optim.clip import Clip
from compiled_optim.lamb import Lamb
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import RunOptions


def _linear(x: float, warmup: float) -> float:
    return max((x - 1) / (warmup - 1), 0.0)


SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "warmup_cosine": lambda x, warmup: 0.5 * (1 + math.cos(math.pi * x)),
    "warmup_constant": lambda x, warmup: 1.0,
    "warmup_linear": _linear,
    "warmup_poly": lambda x, warmup: (1 - x) ** 0.5 if x <= 1 else 0.0,
}
"""The factor of the learning rate after warm-up, by the share ``x`` of ``t_total`` that is done."""


class BertAdam(Lamb):
    """BertAdam as in NVIDIA's BERT: :class:`Lamb`'s direction with trust 1, clipping by group, and a schedule.

    Over ``t_total`` steps the learning rate rises linearly for the share ``warmup`` and then follows ``schedule``:
    warmup_linear, warmup_cosine, warmup_constant or warmup_poly; ``t_total=-1`` keeps it constant. Gradients are
    clipped to ``max_grad_norm``, measured over each group's gradients of one dtype; -1 does not clip. The step count is
    saved, so a resumed run goes on where it was in the schedule.

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
        defaults = {
            "lr": lr,
            "warmup": warmup,
            "t_total": t_total,
            "schedule": schedule,
            "b1": b1,
            "b2": b2,
            "e": e,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "maximize": maximize,
        }
        Optimizer.__init__(self, params, defaults, **options)

    def check(self, group: dict[str, Any]) -> None:
        check_lr(group["lr"])
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
        check_not_negative("epsilon value", group["e"])
        check_not_negative("weight_decay value", group["weight_decay"])

    def options(self, group: dict[str, Any]) -> dict[str, bool]:
        return {"decays": bool(group["weight_decay"] != 0), "trusts": False}

    def clips(self, group: dict[str, Any], dtype: torch.dtype) -> list[Clip]:
        return [Clip(group["max_grad_norm"], pool=(id(group), dtype))] if group["max_grad_norm"] > 0 else []

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, float]:
        lr, betas, eps = scheduled_lr(group, step - 1), (group["b1"], group["b2"]), group["e"]
        return super().scalars({**group, "lr": lr, "betas": betas, "eps": eps}, step)

    def get_lr(self) -> list[float]:
        """The learning rate of the next step for each parameter that has a gradient; ``[0]`` before the first step."""
        with_grad = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not all(self.own_state.get(param) for _, param in with_grad):
            return [0]
        return [scheduled_lr(group, int(self.own_state[param]["step"])) for group, param in with_grad]


def scheduled_lr(group: dict[str, Any], steps_done: int) -> float:
    """A group's learning rate after so many steps."""
    lr = float(group["lr"])
    if group["t_total"] == -1:
        return lr
    x, warmup = steps_done / group["t_total"], group["warmup"]
    return lr * (x / warmup if x < warmup else SCHEDULES[group["schedule"]](x, warmup))
