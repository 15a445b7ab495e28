"""Scaling gradients inside the step: unscaled as a GradScaler asks for, and clipped by their norm.

They are read once for their norm, and never written. The clipping coefficient is torch's, ``max_norm / (norm + 1e-6)``
if that is below 1; a norm that is not finite therefore makes gradients zero or NaN, as there. The scale reaches the
update as a tensor: the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compiled_optim.amp import inverse_scale
from compiled_optim.lists import sum_dtype

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


class Scaling:
    """The phase before the update that finds by what each batch's gradients are multiplied: unscaled and clipped."""

    def __init__(self, optimizer: Optimizer, specs: Sequence[BatchSpec]) -> None:
        self._clips = optimizer.clips_any()
        self.calls = [spec.bind(optimizer, spec.norm_signature) if self._clips else [] for spec in specs]

    def run(
        self, optimizer: Optimizer, batches: Sequence[Batch], gathered: Sequence[Sequence[Tensor]]
    ) -> Tensor | None:
        """Set the batches' gradient scale and return the norm of all gradients before clipping, if any are clipped."""
        unscale = inverse_scale(optimizer)
        if not self._clips and unscale is None:
            return None
        clips = [optimizer.clips(batch.spec.group, batch.spec.dtypes[0]) for batch in batches]
        norms = self._norms(batches, gathered, clips) if self._clips else {}
        for batch, batch_clips in zip(batches, clips, strict=True):
            scale = None if unscale is None else unscale.to(batch.grad_scale, non_blocking=True)
            for clip in batch_clips:
                norm = norms[clip.pool].to(batch.grad_scale.device)
                norm = norm if scale is None else norm * scale
                # by a 0-dim CPU tensor: one launch; by a number, torch takes the reciprocal and multiplies
                max_norm = torch.tensor(clip.max_norm, dtype=norm.dtype, device="cpu")
                factor = (max_norm / (norm + clip.eps)).clamp(max=1.0)
                scale = factor if scale is None else scale * factor
            if scale is not None:
                batch.grad_scale.copy_(-scale if batch.spec.group["maximize"] else scale)
        if not self._clips:
            return None
        return norms[None] if unscale is None else norms[None] * unscale.to(norms[None])

    def _norms(
        self, batches: Sequence[Batch], gathered: Sequence[Sequence[Tensor]], clips: Sequence[Sequence[Clip]]
    ) -> dict[Hashable, Tensor]:
        """The norm of the gradients in each pool, as they are."""
        squares = [
            [square for call in calls if (square := call(grads)) is not None]
            for calls, grads in zip(self.calls, gathered, strict=True)
        ]
        pools: dict[Hashable, list[Tensor]] = {None: []}
        for batch_squares, batch_clips in zip(_over_processes(batches, squares), clips, strict=True):
            for pool in dict.fromkeys([None, *(clip.pool for clip in batch_clips)]):
                pools.setdefault(pool, []).extend(batch_squares)
        return {pool: _norm(squares) for pool, squares in pools.items()}


def _over_processes(batches: Sequence[Batch], squares: Sequence[list[Tensor]]) -> list[list[Tensor]]:
    """The batches' sums of squares, added up over processes where they are split; one collective for all alike."""
    totals = list(squares)
    for split in dict.fromkeys(batch.spec.split for batch in batches if batch.spec.split is not None):
        places = [i for i, batch in enumerate(batches) if batch.spec.split == split]
        zeros = [torch.zeros_like(scale, dtype=sum_dtype(scale)) for scale in (batches[i].grad_scale for i in places)]
        sums = torch.stack([sum(squares[i], zero) for i, zero in zip(places, zeros, strict=True)])
        split.add_up(sums)
        for i, total in zip(places, sums.unbind(), strict=True):
            totals[i] = [total]
    return totals


def _norm(squares: Sequence[Tensor]) -> Tensor:
    """The root of a sum, taken on an accelerator if there is one among the devices: so the host waits for none."""
    if not squares:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    home = next((square for square in squares if square.device.type != "cpu"), squares[0])
    moved = [square.to(home, non_blocking=True) for square in squares]
    total = torch.stack(moved).sum() if len(moved) > 2 else sum(moved[1:], moved[0])
    return total.sqrt()
