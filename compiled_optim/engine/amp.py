"""Unscale gradients of ``torch.amp.GradScaler`` inside the step, and skip the step if one is not finite.

By default the scaler unscales gradients before the step, and does not call the step after an overflow. Frameworks
expect this: they clip gradients in between, and look whether the step was called. With ``fused=True`` it leaves both to
the step, as for the fused optimizers of torch. The scaler looks for infinities, and sets ``grad_scale`` and
``found_inf`` on the optimizer. The update unscales gradients in place, in the pass that reads them.

On the CPU the host reads ``found_inf`` and skips the step. On accelerators the update itself reads it and changes
nothing after an overflow, so the host does not wait for the device. The host counts the step before it knows whether
the device has skipped it. ``found_inf`` is copied to the host asynchronously, and read before the next step or whenever
the state is used: only then a step that was skipped is uncounted. The host waits only if it is a whole iteration ahead
of the device, because the step count of the next update depends on the value.

The default also moves fewer bytes: the scaler reads and writes all gradients in any case, to look for infinities. In
float32, AdamW moves 8 + 28 bytes for each parameter by default, and 8 + 32 with ``fused=True``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from compiled_optim.backends.staging import fetch
from compiled_optim.engine.bound import BoundBucket
from compiled_optim.engine.states import State


def is_overflow(found_inf: Tensor | None) -> bool:
    """Return True if the scaler found a gradient that is not finite, so that this step must be skipped."""
    return found_inf is not None and bool(found_inf)


def inverse_scale(grad_scale: Tensor | None) -> Tensor:
    """Return the factor that unscales gradients: 1 if they are not scaled, or were unscaled before the step."""
    if grad_scale is not None:
        return grad_scale.reciprocal().reshape(())
    return torch.ones((), dtype=torch.float32, device="cpu")


def unscale_unless_skipped(unscale: Tensor, found_inf: Tensor | None) -> Tensor:
    """Return the factor that unscales gradients, or 1 if the step is skipped."""
    return unscale if found_inf is None else torch.where(found_inf.reshape(()) == 0, unscale.to(found_inf.device), 1.0)


class UnconfirmedStep:
    """A step of which the host does not know yet whether the device has skipped it."""

    def __init__(self, found_inf: Tensor, buckets: Sequence[BoundBucket]) -> None:
        """Start to copy ``found_inf`` to the host. ``buckets`` are those of the step, before it is made."""
        self._read = fetch(found_inf.reshape(()))
        self._buckets = [(bound, bound.scalar_rows.progress(), bound.created) for bound in buckets]

    def confirm(self, state: State) -> bool:
        """Restore step counts and numbers if the step was skipped; remove the states that it has created.

        Return False if states were removed. The call can be repeated.
        """
        if not self._read():
            return True
        for bound, before, created in self._buckets:
            bound.scalar_rows.write(before, False)
            for i in created:
                state.pop(bound.bucket.entries[i].param, None)
        return not any(created for _, _, created in self._buckets)


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
