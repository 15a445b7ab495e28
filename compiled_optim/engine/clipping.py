"""Scale gradients inside the step: unscale them for GradScaler, and clip them by their norm.

Gradients are read once for their norm and never written. The clipping coefficient is that of torch,
``max_norm / (norm + 1e-6)`` if that is below 1. As in torch, a norm that is not finite makes gradients zero or NaN. The
scale is passed to the update as a tensor, so the host does not wait for the device.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from compiled_optim.backends import BoundBatch
from compiled_optim.engine.buckets import Bucket
from compiled_optim.engine.rule import Clip, Rule
from compiled_optim.tensors import sum_dtype


class ScaledBucket(Protocol):
    """A bucket whose gradients are multiplied by ``grad_scale``."""

    @property
    def bucket(self) -> Bucket:
        """The bucket."""

    @property
    def grad_scale(self) -> Tensor:
        """A 0-dim tensor, rewritten before each update."""


class GradScaling:
    """Computes, before the update, the factor by which the gradients of each bucket are multiplied."""

    def __init__(self, rule: Rule, buckets: Sequence[Bucket], clips: bool) -> None:
        self._rule = rule
        self.clips = clips
        self.norms: list[BoundBatch | None] = [bucket.norm.bind() if clips else None for bucket in buckets]

    def run(
        self, buckets: Sequence[ScaledBucket], grads: Sequence[Sequence[Tensor]], unscale: Tensor | None
    ) -> Tensor | None:
        """Set ``grad_scale`` of each bucket; return the norm of all gradients if any are clipped."""
        clips = [self._rule.clips(scaled.bucket.group, scaled.bucket.dtypes[0]) for scaled in buckets]
        norms = self._pool_norms(buckets, grads, clips) if self.clips else {}
        for scaled, bucket_clips in zip(buckets, clips, strict=True):
            scale = None if unscale is None else unscale.to(scaled.grad_scale, non_blocking=True)
            for clip in bucket_clips:
                norm = norms[clip.pool].to(scaled.grad_scale.device)
                norm = norm if scale is None else norm * scale
                # a 0-dim CPU tensor needs one launch; for a number, torch computes the reciprocal and multiplies
                max_norm = torch.tensor(clip.max_norm, dtype=norm.dtype, device="cpu")
                factor = (max_norm / (norm + clip.eps)).clamp(max=1.0)
                scale = factor if scale is None else scale * factor
            if scale is not None:
                scaled.grad_scale.copy_(-scale if scaled.bucket.group["maximize"] else scale)
        if not self.clips:
            return None
        return norms[None] if unscale is None else norms[None] * unscale.to(norms[None])

    def _pool_norms(
        self, buckets: Sequence[ScaledBucket], grads: Sequence[Sequence[Tensor]], clips: Sequence[Sequence[Clip]]
    ) -> dict[Hashable, Tensor]:
        """Return the norm of the gradients in each pool, before they are unscaled."""
        squares = [None if norm is None else norm(each) for norm, each in zip(self.norms, grads, strict=True)]
        pools: dict[Hashable, list[Tensor]] = {None: []}
        for square, bucket_clips in zip(_all_reduce(buckets, squares), clips, strict=True):
            for pool in dict.fromkeys([None, *(clip.pool for clip in bucket_clips)]):
                pools.setdefault(pool, []).extend([] if square is None else [square])
        return {pool: _norm(squares) for pool, squares in pools.items()}


def _all_reduce(buckets: Sequence[ScaledBucket], squares: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the sums of squares of the buckets over all shards, with one collective for each ShardSpec."""
    totals = list(squares)
    specs = [scaled.bucket.shards for scaled in buckets]
    for spec in dict.fromkeys(spec for spec in specs if spec is not None):
        members = [i for i, other in enumerate(specs) if other == spec]
        scales = [buckets[i].grad_scale for i in members]
        zeros = [torch.zeros_like(scale, dtype=sum_dtype(scale)) for scale in scales]
        sums = [zero if (s := squares[i]) is None else s.sum() for i, zero in zip(members, zeros, strict=True)]
        stacked = torch.stack(sums)
        spec.all_reduce_(stacked)
        for i, total in zip(members, stacked.view(-1, 1), strict=True):
            totals[i] = total
    return totals


def _norm(squares: Sequence[Tensor]) -> Tensor:
    """Return the square root of a sum. It is computed on an accelerator if one tensor is there: no synchronisation."""
    if not squares:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    target = next((square for square in squares if square.device.type != "cpu"), squares[0])
    moved = [square.to(target, non_blocking=True) for square in squares]
    total = torch.cat(moved).sum() if len(moved) > 1 or len(moved[0]) > 1 else moved[0][0]
    return total.sqrt()
