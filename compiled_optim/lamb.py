"""LAMB: Adam without bias correction whose step is scaled, tensor by tensor, to the norm of the weights."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim.clip import Clip
from compiled_optim.lists import TensorList, Total, minus_scaled_, moment_scalars, moments_, settled, squares
from compiled_optim.optimizer import Optimizer
from compiled_optim.options import EngineOptions

MAX_WEIGHT_NORM = 10.0


class Lamb(Optimizer):
    """LAMB (You et al., 2019), for training with very large batches.

    ``u = m / (sqrt(v) + eps) + weight_decay * p`` and ``p -= lr * trust * u``, where trust is the norm of the weights,
    at most 10, over the norm of ``u``, or 1 if either is zero. ``adam=True`` sets trust to 1.
    ``use_global_grad_norm=True`` divides gradients by the norm of all gradients where that is above 1. For the options
    common to all optimizers see :class:`~compiled_optim.Optimizer`.

    >>> weight = torch.nn.Parameter(torch.full((4,), 2.0))
    >>> opt = Lamb([weight], lr=0.5, compile=False)
    >>> weight.sum().backward()
    >>> opt.step()
    >>> [round(value, 4) for value in weight.tolist()]
    [1.0, 1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
        use_global_grad_norm: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam": adam,
            "use_global_grad_norm": use_global_grad_norm,
            "maximize": maximize,
        }
        super().__init__(params, defaults, **options)

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def options(self, group: dict[str, Any]) -> dict[str, bool]:
        return {"decays": bool(group["weight_decay"] != 0), "trusts": not group["adam"]}

    def clips(self, group: dict[str, Any], dtype: torch.dtype) -> list[Clip]:
        unit_norm = [Clip(1.0, eps=0.0)] if group["use_global_grad_norm"] else []
        return [*super().clips(group, dtype), *unit_norm]

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, float]:
        return {
            "lr": float(group["lr"]),
            **moment_scalars(*map(float, group["betas"])),
            "eps": float(group["eps"]),
            "weight_decay": float(group["weight_decay"]),
        }

    @staticmethod
    def update(  # type: ignore[override]
        params: TensorList,
        grads: TensorList,
        *,
        exp_avg: TensorList,
        exp_avg_sq: TensorList,
        lr: Tensor,
        beta1: Tensor,
        gain1: Tensor,
        beta2: Tensor,
        gain2: Tensor,
        eps: Tensor,
        weight_decay: Tensor,
        decays: bool,
        trusts: bool,
        total: Total,
    ) -> None:
        moments_(exp_avg, exp_avg_sq, grads, beta1, gain1, beta2, gain2)
        # tensor by tensor: only so does Inductor take both norms in the pass that computes the step
        steps = [m / (v.sqrt() + eps) for m, v in zip(exp_avg, exp_avg_sq, strict=True)]  # u = m / (sqrt(v) + eps)
        if decays:
            steps = [step + weight_decay * p for step, p in zip(steps, params, strict=True)]  # u += wd p
        if trusts:
            weights, lengths = total(squares(params), squares(steps))  # ‖p‖², ‖u‖²
            trust = [
                settled(trust_ratio(weight.sqrt(), length.sqrt()).to(step.dtype))
                for weight, length, step in zip(weights, lengths, steps, strict=True)
            ]
            minus_scaled_(params, torch._foreach_mul(steps, trust), lr)  # p -= lr trust u
        else:
            minus_scaled_(params, steps, lr)


def trust_ratio(weight: Tensor, length: Tensor) -> Tensor:
    """By how much a step of this length is scaled for weights of this norm."""
    return torch.where((weight > 0) & (length > 0), weight.clamp(max=MAX_WEIGHT_NORM) / length, 1.0)
