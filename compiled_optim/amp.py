"""Gradients scaled by ``torch.amp.GradScaler``: unscaled inside the step, which is left out if one is not finite.

The scaler looks for infinities, then sets ``grad_scale`` and ``found_inf`` on the optimizer for the length of its step.
Whether to step is decided on the host, as in the scaler's path for ordinary optimizers: on an accelerator it waits for
the gradients there, once a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from compiled_optim.optimizer import Optimizer


def has_scaler(optimizer: Optimizer) -> bool:
    """Whether a scaler makes the coming step, be it with gradients that somebody has unscaled."""
    return not {"found_inf", "grad_scale"}.isdisjoint(vars(optimizer))


def is_overflow(optimizer: Optimizer) -> bool:
    """Whether the scaler found a gradient that is not finite, so that this step must not be made."""
    found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def inverse_scale(optimizer: Optimizer) -> Tensor | None:
    """What gradients are to be multiplied by, or None if they never were scaled; 1 if somebody has unscaled them."""
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        return scale.reciprocal().reshape(())
    return torch.ones((), dtype=torch.float32, device="cpu") if optimizer.unscales else None


def forget_scaler(optimizer: Optimizer) -> None:
    """After a step that failed: the scaler would not, and the next one would unscale twice."""
    if "found_inf" in vars(optimizer):
        del optimizer.found_inf
        vars(optimizer).pop("grad_scale", None)


def step_unscaled(scaler: Any, optimizer: Optimizer) -> float | None:
    """Step for a scaler that leaves unscaling to the optimizer by ``step(grad_scaler=self)``, as torch_npu's does.

    It gets the step back as that of an ordinary optimizer, whose gradients it unscales itself.
    """
    optimizer._step_supports_amp_scaling = False
    try:
        loss: float | None = scaler.step(optimizer)
        return loss
    finally:
        del optimizer._step_supports_amp_scaling
