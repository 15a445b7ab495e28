"""Unscale gradients of ``torch.amp.GradScaler`` inside the step, and skip the step if one is not finite.

By default the scaler unscales gradients before the step, and does not call the step after an overflow. Frameworks
expect this: they clip gradients in between, and look whether the step was called. With ``fused=True`` it leaves both to
the step, as for the fused optimizers of torch. The scaler looks for infinities, and sets ``grad_scale`` and
``found_inf`` on the optimizer. The update unscales gradients in place, in the pass that reads them. The host decides
whether to skip the step, so it waits for an accelerator once per step.

The default also moves fewer bytes: the scaler reads and writes all gradients in any case, to look for infinities. In
float32, AdamW moves 8 + 28 bytes for each parameter by default, and 8 + 32 with ``fused=True``.
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
    """Return the factor that unscales gradients: 1 if they are not scaled, or were unscaled before the step."""
    if grad_scale is not None:
        return grad_scale.reciprocal().reshape(())
    return torch.ones((), dtype=torch.float32, device="cpu")


@contextmanager
def without_amp_scaling(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Make GradScaler treat an optimizer as one that does not unscale gradients itself, in this context."""
    attributes = vars(optimizer)
    before = attributes["_step_supports_amp_scaling"]
    attributes["_step_supports_amp_scaling"] = False
    try:
        yield
    finally:
        attributes["_step_supports_amp_scaling"] = before


def remove_marks(attributes: dict[str, Any]) -> None:
    """Remove what a scaler has set on an optimizer.

    The scaler does not do so after a step that raised, and the next step would unscale twice.
    """
    if "found_inf" in attributes:
        del attributes["found_inf"]
        attributes.pop("grad_scale", None)
