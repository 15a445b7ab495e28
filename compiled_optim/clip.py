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
        pools: dict[Hashable, Tensor] = {None: torch.zeros((), dtype=torch.float64, device="cpu")}
        clips = [optimizer.clips(batch.spec.group, batch.spec.dtypes[0]) for batch in batches]
        for calls, grads, batch_clips in zip(self.calls, gathered, clips, strict=True):
            square = pools[None].new_zeros(())
            for call in calls:
                part = call(grads)
                assert part is not None
                square += part.to(square.device)
            for pool in dict.fromkeys([None, *(clip.pool for clip in batch_clips)]):
                pools[pool] = pools[pool] + square if pool in pools else square
        for batch, batch_clips in zip(batches, clips, strict=True):
            scale = pools[None].new_ones(())
            for clip in batch_clips:
                norm = pools[clip.pool].sqrt() * scale
                scale = scale * (clip.max_norm / (norm + clip.eps)).clamp(max=1.0)
            batch.grad_scale.copy_(-scale if batch.spec.group["maximize"] else scale)
        return pools[None].sqrt()
