"""Flat buffers: the parameters of a bucket, their gradients and their states, each kind in one long tensor.

A call works on a part of a buffer, whatever tensors lie there. So neither the number of calls nor the size of a
compiled graph depends on the number of tensors. Parameters and states are views of the buffers. Gradients are new
tensors in every step, and are copied into their buffer by one list operation.

Padding is zero at first. A rule may write anything there, also NaN; no result depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.engine import layout, states
from compiled_optim.engine.bound import BoundBucket
from compiled_optim.engine.buckets import Bucket
from compiled_optim.engine.flat_layout import MARK, mark_of
from compiled_optim.engine.rows import Progress, RowReader
from compiled_optim.engine.stored_states import MASTER
from compiled_optim.program import EMA


class FlatBuffer:
    """One long tensor, and its views: a view for each tensor, with its shape and strides, and a view for each call."""

    def __init__(self, bucket: Bucket, dtype: torch.dtype) -> None:
        place = bucket.flat_layout
        memory = torch.zeros(place.length, dtype=dtype, device=bucket.device)
        self.views = [
            memory.as_strided(entry.local.shape, layout.working_strides(entry.local, bucket.rows), offset)
            for entry, offset in zip(bucket.entries, place.offsets, strict=True)
        ]
        lengths = list(map(math.prod, place.parts))
        self.parts = [part.view(shape) for part, shape in zip(torch.split(memory, lengths), place.parts, strict=True)]
        for tensor in (memory, *self.views):  # which share a storage, if the device keeps its memory there
            setattr(tensor.untyped_storage(), MARK, object())

    def holds(self, i: int, tensor: Tensor) -> bool:
        """Return True if a tensor is the view with this index, or another view of the same memory."""
        view = self.views[i]
        return (
            mark_of(tensor) is mark_of(view)
            and tensor.dtype == view.dtype
            and tensor.storage_offset() == view.storage_offset()
            and tensor.shape == view.shape
            and tensor.stride() == view.stride()
        )

    def load(self, tensors: Mapping[int, Tensor]) -> None:
        """Copy tensors into the views with these indices."""
        # a tensor may be a view of another one's memory in this buffer
        own = set(map(mark_of, self.views))
        sources = [tensor.clone() if mark_of(tensor) in own else tensor for tensor in tensors.values()]
        if sources:
            torch._foreach_copy_([self.views[i] for i in tensors], [source.detach() for source in sources])


class FlatMemory:
    """The flat buffers of one optimizer. Those of a bucket are kept for a later bucket with the same parameters."""

    def __init__(self) -> None:
        self.repointed: list[Tensor] = []
        """The parameters that were pointed to other memory since this list was cleared."""
        self._in_use: list[tuple[Bucket, list[FlatBuffer]]] = []

    def buffers_for(self, bucket: Bucket) -> list[FlatBuffer]:
        """Return buffers for gradients, parameters and each state of a bucket."""
        for other, buffers in self._in_use:
            if _have_same_places(bucket, other, buffers[0].views):
                return buffers
        return [FlatBuffer(bucket, dtype) for dtype in bucket.dtypes]

    def repoint(self, targets: Mapping[Tensor, Tensor]) -> None:
        """Point parameters to the memory of other tensors, which hold the same values."""
        for param, target in targets.items():
            self.repointed.append(param)  # before it happens, because an interrupt may come in between
            param.data = target

    def settle(
        self, buckets: Sequence[BoundBucket], params: Sequence[Tensor], state: states.State, numbers: Collection[str]
    ) -> None:
        """Keep the buffers of these buckets, and give other parameters and their states memory of their own.

        Otherwise one parameter that has no gradient would keep a whole buffer in memory.
        """
        flat = [bucket for bucket in buckets if isinstance(bucket, FlatBucket)]
        kept = {id(entry.param) for bucket in flat for entry in bucket.bucket.entries}
        others = set(map(id, params)) - kept
        left = [
            entry.param
            for bucket, (_, buffer, *_) in self._in_use
            for i, entry in enumerate(bucket.entries)
            if id(entry.param) in others and buffer.holds(i, entry.param)
        ]
        self._in_use = [(bucket.bucket, bucket.buffers) for bucket in flat]
        for param in left:
            if param in state:
                state[param] = states.copy_parts(state[param], numbers)
        self.repoint({param: param.detach().clone() for param in left})


def _have_same_places(bucket: Bucket, other: Bucket, views: Sequence[Tensor]) -> bool:
    """Return True if a bucket can use the buffers of another one, of which these are the views."""
    return (
        bucket.device == other.device
        and bucket.dtypes == other.dtypes
        and bucket.flat_layout == other.flat_layout
        and all(a.param is b.param for a, b in zip(bucket.entries, other.entries, strict=True))
        and all(
            view.shape == entry.local.shape and view.stride() == layout.working_strides(entry.local, bucket.rows)
            for view, entry in zip(views, bucket.entries, strict=True)
        )
    )


class FlatBucket(BoundBucket):
    """A bucket whose tensors lie in flat buffers."""

    def __init__(self, bucket: Bucket, readers: Sequence[RowReader], state: states.State, memory: FlatMemory) -> None:
        self._memory = memory
        self.buffers = memory.buffers_for(bucket)
        super().__init__(bucket, readers, state)

    def pick_grads(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Copy the gradients of this bucket into their buffer; return its parts."""
        torch._foreach_copy_(self.buffers[0].views, list(self._pick(grads)))
        return self.buffers[0].parts

    @property
    def converted(self) -> Sequence[int]:
        """The indices of all entries."""
        return range(len(self.bucket.entries))

    def run(self, grads: Sequence[Tensor | None], some_absent: bool) -> None:
        """Update the parameters and states in place. No gradient is None.

        If an exception comes between two calls, the others are made before it is raised again: a parameter may lie in
        the parts of several calls.
        """
        runs, after = self._update.runs[:], self.scalar_rows.after(None)
        try:
            self._update(grads)
            self._finish(after)
        except BaseException:
            if self._update.runs != runs:
                self._update.finish(runs, grads)
                self._finish(after)
            raise

    def _finish(self, progress: Progress) -> None:
        """Count the step. The call can be repeated."""
        self.scalar_rows.write(progress, True)
        self._created = []

    def _place(
        self, values: Sequence[dict[str, Any]], initial: Sequence[Mapping[str, float]]
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        _, params, *of_states = self.buffers
        named = dict(zip(self.bucket.program.kept, of_states, strict=True))
        for name, buffer in named.items():
            elsewhere = {}
            for i, (own, entry) in enumerate(zip(values, self.bucket.entries, strict=True)):
                tensor = own.get(name)
                if tensor is None and name in (EMA, MASTER):  # both start as copies of the parameter
                    tensor = entry.param
                if tensor is None:
                    buffer.views[i].fill_(initial[i].get(name, 0.0))
                elif not buffer.holds(i, tensor):
                    elsewhere[i] = tensor
            buffer.load(elsewhere)
        moved = {i: entry.param for i, entry in enumerate(self.bucket.entries) if not params.holds(i, entry.param)}
        params.load(moved)
        # all values are copied before the first tensor is replaced
        self._memory.repoint({param: params.views[i] for i, param in moved.items()})
        kept = []
        for i, own in enumerate(values):
            for name, buffer in named.items():
                if own.get(name) is None or not buffer.holds(i, own[name]):
                    own[name] = buffer.views[i].detach()  # an object that user code may point elsewhere
                kept.append(own[name])
        return kept, [buffer.parts for buffer in (params, *of_states)]

    def _row_arguments(self) -> dict[str, Tensor]:
        place = self.bucket.flat_layout
        if not place.segments:
            return {}
        options: Any = {"dtype": torch.int32, "device": self.bucket.device}
        made = {"row_segments": torch.tensor(place.row_segments(), **options)}
        if place.is_padded:
            sizes = torch.tensor(place.row_sizes(), **options)
            made["mask"] = torch.arange(place.width, **options) < sizes.unsqueeze(1)
        return made
