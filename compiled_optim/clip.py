"""Clipping by norm inside the step: the gradients are read once for their norm, and never written.

The coefficient is torch's, ``max_norm / (norm + 1e-6)`` if that is below 1. It reaches the update as a tensor: the host
waits for nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from compiled_optim.collect import BatchSpec
    from compiled_optim.optimizer import Optimizer
    from compiled_optim.plan import Batch


@dataclass(frozen=True)
class Clip:
    """Gradients are scaled down to a norm of at most ``max_norm``, measured over all that have the same ``pool``.

    The pool None is all gradients of the optimizer, also of groups that are not clipped themselves.
    """

    max_norm: float
    pool: Hashable = None
    eps: float = 1e-6


class Clipping:
    """The phase before the update that measures the gradients and sets each batch's scale."""

    def __init__(self, optimizer: Optimizer, specs: Sequence[BatchSpec]) -> None:
        self.calls = [spec.bind(optimizer, spec.norm_signature) for spec in specs]

    def run(self, optimizer: Optimizer, batches: Sequence[Batch], gathered: Sequence[Sequence[Tensor]]) -> Tensor:
        """Set the batches' gradient scale and return the norm of all gradients before clipping."""
        pools: dict[Hashable, list[Tensor]] = {None: []}
        clips = [optimizer.clips(batch.spec.group, batch.spec.dtypes[0]) for batch in batches]
        for calls, grads, batch_clips in zip(self.calls, gathered, clips, strict=True):
            squares = [square for call in calls if (square := call(grads)) is not None]
            for pool in dict.fromkeys([None, *(clip.pool for clip in batch_clips)]):
                pools.setdefault(pool, []).extend(squares)
        norms = {pool: _norm(squares) for pool, squares in pools.items()}
        for batch, batch_clips in zip(batches, clips, strict=True):
            scale: Tensor | None = None
            for clip in batch_clips:
                norm = norms[clip.pool].to(batch.grad_scale.device)
                norm = norm if scale is None else norm * scale
                # by a 0-dim CPU tensor: one launch; by a number, torch takes the reciprocal and multiplies
                max_norm = torch.tensor(clip.max_norm, dtype=norm.dtype, device="cpu")
                factor = (max_norm / (norm + clip.eps)).clamp(max=1.0)
                scale = factor if scale is None else scale * factor
            if scale is not None:
                batch.grad_scale.copy_(-scale if batch.spec.group["maximize"] else scale)
        return norms[None]


def _norm(squares: Sequence[Tensor]) -> Tensor:
    """The root of a sum, taken on an accelerator if there is one among the devices: so the host waits for none."""
    if not squares:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    home = next((square for square in squares if square.device.type != "cpu"), squares[0])
    moved = [square.to(home, non_blocking=True) for square in squares]
    total = torch.stack(moved).sum() if len(moved) > 2 else sum(moved[1:], moved[0])
    return total.sqrt()
