"""Means over dimensions of matrices that are split over processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from compiled_optim.backends import BoundBatch
from compiled_optim.engine import layout
from compiled_optim.engine.buckets import Bucket


class SplitMeans:
    """The means of one stage for all tensors of a bucket, in one buffer that one collective adds up.

    ``tensors`` are its parts, which the program reads.
    """

    def __init__(self, bucket: Bucket, number: int) -> None:
        """Take the number of the stage among those of means."""
        assert bucket.shards is not None
        program, entries = bucket.program, bucket.entries
        mean = program.means[number]
        place = bucket.first_mean + number
        shapes = [program.list_shape(place, layout.view_shape(entry.local, bucket.rows)) for entry in entries]
        sizes = list(map(math.prod, shapes))
        self._buffer = torch.zeros(sum(sizes), dtype=bucket.sum_dtype, device=bucket.device)
        self.tensors = [part.view(shape) for part, shape in zip(torch.split(self._buffer, sizes), shapes, strict=True)]
        self._lengths = [float(entry.param.shape[mean.dim]) for entry in entries]
        self._shards = replace(bucket.shards, dims=dict(bucket.splits)[mean.dim])

    def compute(self, average: BoundBatch, grads: Sequence[Tensor | None]) -> None:
        """Compute the means over all shards. ``average`` writes the sums over the local ones."""
        self._buffer.zero_()  # also for a tensor without a gradient
        average(grads)
        self._shards.all_reduce_(self._buffer)
        torch._foreach_div_(self.tensors, self._lengths)
