"""Scale gradients inside the step: unscale them for GradScaler, and clip them by their norm.

Gradients are read once for their norm. The update unscales them in place, and clips only what the rule gets. The
clipping coefficient is that of torch, ``max_norm / (norm + 1e-6)`` if that is below 1. As in torch, a norm that is not
finite makes gradients zero or NaN. Both factors are passed to the update as tensors, so the host does not wait for the
device.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from compiled_optim.backends import BoundBatch
from compiled_optim.engine.buckets import Bucket
from compiled_optim.engine.rows import Rows
from compiled_optim.engine.rule import Clip, Rule
from compiled_optim.engine.sharding import ShardSpec

Grads = Sequence[Tensor | None]


class GradScaling:
    """Computes, before the update, the factors by which gradients are multiplied."""

    def __init__(self, rule: Rule, buckets: Sequence[Bucket], clips: bool) -> None:
        self._rule = rule
        self.clips = clips
        self.norms: list[BoundBatch | None] = [bucket.norm.bind() if clips else None for bucket in buckets]

    def run(
        self,
        bucket_rows: Sequence[Rows],
        grads: Sequence[Grads],
        unscale: Tensor | None,
        found_inf: Tensor | None = None,
    ) -> Tensor | None:
        """Set the scales and ``found_inf`` of each bucket; return the norm of all gradients if any are clipped.

        The norm is that of the unscaled gradients.
        """
        if unscale is not None:
            for rows in bucket_rows:
                _set(rows.inv_scale, unscale)
                if rows.found_inf is not None:
                    _set(rows.found_inf, found_inf)
        if not self.clips:
            return None
        clips = [self._clips_of_groups(rows.bucket) for rows in bucket_rows]
        if (at_once := self._clip_at_once(bucket_rows, grads, clips, unscale)) is not None:
            return at_once
        norms = self._pool_norms(bucket_rows, grads, clips)
        if unscale is not None:
            norms = {pool: norm * unscale.to(norm) for pool, norm in norms.items()}
        for rows, of_group in zip(bucket_rows, clips, strict=True):
            target = rows.grad_scale
            factors: dict[Hashable, Tensor] = {}
            keys = [(of_group[group], rows.bucket.groups[group]["maximize"]) for group in rows.groups]
            for own_clips, maximize in dict.fromkeys(keys):
                factor = _clip_factor(own_clips, norms, target.device)
                if factor is not None:
                    factors[own_clips, maximize] = -factor if maximize else factor
            if factors and len(set(keys)) == 1:
                target.copy_(factors[keys[0]])
            elif factors:
                for row, key in enumerate(keys):
                    target[row] = factors.get(key, -1.0 if key[1] else 1.0)
        return norms[None]

    def _clip_at_once(
        self,
        bucket_rows: Sequence[Rows],
        grads: Sequence[Grads],
        clips: Sequence[dict[int, tuple[Clip, ...]]],
        unscale: Tensor | None,
    ) -> Tensor | None:
        """Set ``grad_scale`` with one call of the backend for each bucket; return the norm.

        Return None if the backend cannot do it, or if there are several norms, several factors for a bucket, or shards.
        """
        most = max((len(own) for of_group in clips for own in of_group.values()), default=0)
        if not all(rows.bucket.backend.clips_at_once(rows.grad_scale.dtype, most) for rows in bucket_rows):
            return None
        keys = [
            {(of_group[group], bool(rows.bucket.groups[group]["maximize"])) for group in rows.groups}
            for rows, of_group in zip(bucket_rows, clips, strict=True)
        ]
        pools = {clip.pool for own in keys for own_clips, _ in own for clip in own_clips}
        places = {(rows.bucket.backend, rows.bucket.device, rows.bucket.shards) for rows in bucket_rows}
        if len(pools) != 1 or len(places) != 1 or bucket_rows[0].bucket.shards is not None:
            return None
        if any(len(own) != 1 or not own_clips for own in keys for own_clips, _ in own):
            return None
        squares = [norm(own) for norm, own in zip(self.norms, grads, strict=True) if norm is not None]
        present = [square for square in squares if square is not None]
        together = present[0] if len(present) == 1 else torch.cat(present)
        norm = None
        for rows, own in zip(bucket_rows, keys, strict=True):
            ((own_clips, maximize),) = own
            limits = [(clip.max_norm, clip.eps) for clip in own_clips]
            inv_scale = None if unscale is None else rows.inv_scale
            norm = rows.bucket.backend.clip(together, limits, maximize, inv_scale, rows.grad_scale)
        return norm

    def _clips_of_groups(self, bucket: Bucket) -> dict[int, tuple[Clip, ...]]:
        """Return the clips of each group of a bucket, by the number of the group."""
        dtype = bucket.dtypes[0]
        return {number: tuple(self._rule.clips(bucket.groups[number], dtype)) for number in bucket.group_numbers}

    def _pool_norms(
        self, bucket_rows: Sequence[Rows], grads: Sequence[Grads], clips: Sequence[dict[int, tuple[Clip, ...]]]
    ) -> dict[Hashable, Tensor]:
        """Return the norm of the gradients in each pool. They are not unscaled yet."""
        squares = []
        for rows, norm, own, of_group in zip(bucket_rows, self.norms, grads, clips, strict=True):
            assert norm is not None
            squares.append(_by_group(rows.bucket, norm(own)) if _has_pools(of_group) else norm(own))
        pools: dict[Hashable, list[Tensor]] = {None: []}
        for total, of_group in zip(_all_reduce(bucket_rows, squares), clips, strict=True):
            if total is None:
                continue
            pools[None].append(total)
            for place, group_clips in enumerate(of_group.values()):
                for pool in dict.fromkeys(clip.pool for clip in group_clips if clip.pool is not None):
                    pools.setdefault(pool, []).append(total[place : place + 1] if len(of_group) > 1 else total)
        return {pool: _norm(squares) for pool, squares in pools.items()}


def _set(target: Tensor, value: Tensor | None) -> None:
    """Set a 0-dim tensor to a value, or to 0, without waiting for its device."""
    if value is None:
        target.zero_()
    elif value.device.type == "cpu" and target.device.type != "cpu":
        target.fill_(float(value))  # a copy from memory that is not pinned may wait
    else:
        target.copy_(value.reshape(()), non_blocking=True)


def _has_pools(of_group: dict[int, tuple[Clip, ...]]) -> bool:
    """Return True if one of several groups of a bucket is clipped by a norm that is not that of all gradients."""
    return len(of_group) > 1 and any(clip.pool is not None for clips in of_group.values() for clip in clips)


def _clip_factor(clips: Sequence[Clip], norms: dict[Hashable, Tensor], device: torch.device) -> Tensor | None:
    """Return the product of the factors of all clips; None if there is no clip."""
    scale = None
    for clip in clips:
        norm = norms[clip.pool].to(device)
        norm = norm if scale is None else norm * scale
        # a 0-dim CPU tensor needs one launch; for a number, torch computes the reciprocal and multiplies
        max_norm = torch.tensor(clip.max_norm, dtype=norm.dtype, device="cpu")
        factor = (max_norm / (norm + clip.eps)).clamp(max=1.0)
        scale = factor if scale is None else scale * factor
    return scale


def _by_group(bucket: Bucket, squares: Tensor | None) -> Tensor | None:
    """Return the sum of squares of each group of a bucket."""
    # a backend that takes several groups in a batch returns a sum for each tensor; not index_add_, whose result depends
    # on the order of threads on a GPU
    return None if squares is None else torch.where(bucket.group_members, squares, 0.0).sum(1)


def _all_reduce(bucket_rows: Sequence[Rows], squares: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the sums of squares of the buckets over all shards, with one collective for each ShardSpec."""
    totals = list(squares)
    members: dict[ShardSpec, list[int]] = {}
    for i, rows in enumerate(bucket_rows):
        if rows.bucket.shards is not None:
            members.setdefault(rows.bucket.shards, []).append(i)
    for spec, places in members.items():
        parts = [_part(bucket_rows[i], squares[i]) for i in places]
        stacked = torch.cat(parts)
        spec.all_reduce_(stacked)
        for i, total in zip(places, torch.split(stacked, [len(part) for part in parts]), strict=True):
            totals[i] = total
    return totals


def _part(rows: Rows, squares: Tensor | None) -> Tensor:
    """Return the sums of a bucket in a form that has the same length in all processes."""
    if squares is None:
        return torch.zeros(1, dtype=rows.bucket.sum_dtype, device=rows.bucket.device)
    return squares if len(squares) == len(rows.bucket.group_numbers) else squares.sum().view(1)


def _norm(squares: Sequence[Tensor]) -> Tensor:
    """Return the square root of a sum. It is computed on an accelerator if one tensor is there: no synchronisation."""
    if not squares:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    target = next((square for square in squares if square.device.type != "cpu"), squares[0])
    moved = [square.to(target, non_blocking=True) for square in squares]
    total = torch.cat(moved).sum() if len(moved) > 1 or len(moved[0]) > 1 else moved[0][0]
    return total.sqrt()
