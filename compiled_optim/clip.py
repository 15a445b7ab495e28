"""Clipping by global norm inside the step: the gradients are read once for their norm, and never written.

The norm is over all gradients of all groups and devices. The coefficient is torch's, ``max_norm / (norm + 1e-6)`` if
that is below 1, and reaches the update as a tensor: the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from compiled_optim.optimizer import Optimizer
    from compiled_optim.plan import Batch, Survey


class Clipping:
    """The phase before the update that measures the gradients and sets each batch's scale."""

    def __init__(self, optimizer: Optimizer, surveys: Sequence[Survey]) -> None:
        assert optimizer.max_grad_norm is not None
        self._max_norm = optimizer.max_grad_norm
        self.units = []
        self._calls = []
        for plan in surveys:
            cuts, sizes = plan.cut(), plan.sizes()
            units = [optimizer.obtain(plan.backend, plan.norm_signature(lane)) for lane, _ in cuts]
            calls = [
                unit.bind([sizes[i] for i in places], [], []) for unit, (_, places) in zip(units, cuts, strict=True)
            ]
            self.units += units
            self._calls.append([(call, places) for call, (_, places) in zip(calls, cuts, strict=True)])

    def run(self, batches: Sequence[Batch], flats: Sequence[list[Tensor]]) -> Tensor:
        """Set the batches' gradient scale and return the norm before clipping."""
        total = torch.zeros((), dtype=torch.float64)
        for calls, grads in zip(self._calls, flats, strict=True):
            for call, places in calls:
                square = call([grads[i] for i in places])
                assert square is not None
                total += square.to(total.device)
        norm = total.sqrt()
        coefficient = (self._max_norm / (norm + 1e-6)).clamp(max=1.0)
        for batch in batches:
            batch.grad_scale.copy_(-coefficient if batch.survey.group["maximize"] else coefficient)
        return norm
