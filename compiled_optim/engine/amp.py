"""Gradients scaled by ``torch.amp.GradScaler``: unscaled inside the step, which is skipped if one is not finite.

The scaler looks for infinities, then sets ``grad_scale`` and ``found_inf`` on the optimizer for the length of its step.
Whether to step is decided on the host, as in the scaler's path for ordinary optimizers: on an accelerator the host
waits for the gradients there, once a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def is_overflow(found_inf: Tensor | None) -> bool:
    """Return True if the scaler found a gradient that is not finite, so that this step must be skipped."""
    return found_inf is not None and bool(found_inf)


def inverse_scale(grad_scale: Tensor | None) -> Tensor:
    """Return what gradients are to be multiplied by: 1 if nobody has scaled them, or somebody has unscaled them."""
    if grad_scale is not None:
        return grad_scale.reciprocal().reshape(())
    return torch.ones((), dtype=torch.float32, device="cpu")


@contextmanager
def without_amp_scaling(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let a scaler treat an optimizer as one that cannot unscale gradients itself."""
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer._step_supports_amp_scaling  # type: ignore[attr-defined]


def remove_marks(attributes: dict[str, Any]) -> None:
    """Remove what a scaler has set on an optimizer.

    The scaler does not do so after a step that raised, and the next step would unscale twice.
    """
    if "found_inf" in attributes:
        del attributes["found_inf"]
        attributes.pop("grad_scale", None)
