"""The memory of flat buffers: which tensors lie in which buffer, and what happens if gradients come and go.

The parameters of a bucket move into buffers of their own once, when they are first stepped: their home. A later bucket
may have only some of them, because others have no gradient or another step count. Then nothing moves:

- A bucket with most of a home is updated there. The segments of the others are saved before the update and restored
  after it.
- A smaller bucket is copied to buffers for the update, and back: a visit. After VISITS steps its parameters move into a
  home of their own, because from then on they probably stay apart.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_optim.engine import layout, states
from compiled_optim.engine.buckets import Bucket
from compiled_optim.engine.flat_layout import MARK, mark_of
from compiled_optim.engine.tensor_types import has_memory, local_shard

VISITS = 8
"""The number of steps with visits after which parameters move. Copies of a few visits cost as much as moving."""


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


_placed: dict[int, int] = {}
"""The address of each parameter, by its id, when an optimizer of this package pointed it to other memory.

It holds no weak references: torch.utils.swap_tensors, which ``module.to()`` may use, refuses tensors that have some.
"""


def was_placed(param: Tensor) -> bool:
    """Return True if a parameter is where an optimizer of this package has put it; not necessarily this one."""
    address = _placed.get(id(param))  # another parameter, also one without memory, may have the id of a former one
    return address is not None and has_memory(param) and local_shard(param).data_ptr() == address


class Home:
    """The buffers into which the parameters of a bucket were moved: gradients, parameters and each state."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.buffers = [FlatBuffer(bucket, dtype) for dtype in bucket.dtypes]
        self._marks = {mark_of(view) for buffer in self.buffers for view in buffer.views}

    @property
    def elements(self) -> int:
        """The number of elements of its tensors."""
        return sum(self.bucket.flat_layout.sizes)

    def residents(self) -> list[int]:
        """Return the indices of the parameters that lie in it now."""
        return [i for i, entry in enumerate(self.bucket.entries) if self.buffers[1].holds(i, entry.param)]

    def is_home_of(self, bucket: Bucket) -> bool:
        """Return True if a bucket has the same parameters, so that it can use the buffers."""
        own = self.bucket
        return (
            bucket.device == own.device
            and bucket.dtypes == own.dtypes
            and bucket.flat_layout == own.flat_layout
            and all(a.param is b.param for a, b in zip(bucket.entries, own.entries, strict=True))
            and all(
                view.shape == entry.local.shape and view.stride() == layout.working_strides(entry.local, bucket.rows)
                for view, entry in zip(self.buffers[0].views, bucket.entries, strict=True)
            )
        )

    def places_of(self, bucket: Bucket, state: states.State) -> list[int] | None:
        """Return the indices of the parameters of a bucket in this home.

        None if one of them, or one of its states, does not lie there, or if anything lies in the place of another.
        """
        own, names = self.bucket, bucket.program.kept
        numbers = {id(entry.param): i for i, entry in enumerate(own.entries)}
        found = [numbers[id(entry.param)] for entry in bucket.entries if id(entry.param) in numbers]
        is_same_kind = (
            bucket.device == own.device
            and (bucket.dtypes, bucket.rows, names) == (own.dtypes, own.rows, own.program.kept)
            and (bool(bucket.flat_layout.segments), bucket.flat_layout.width, bucket.flat_layout.is_padded)
            == (bool(own.flat_layout.segments), own.flat_layout.width, own.flat_layout.is_padded)
        )
        if len(found) < len(bucket.entries) or not is_same_kind:
            return None
        members = set(found)
        for i, entry in enumerate(own.entries):
            values = state.get(entry.param) or {}
            for tensor, buffer in zip((entry.param, *map(values.get, names)), self.buffers[1:], strict=True):
                is_here = tensor is not None and buffer.holds(i, tensor)
                if not is_here and (i in members or (tensor is not None and mark_of(tensor) in self._marks)):
                    return None
        return found


class Placement(NamedTuple):
    """Where a bucket is updated: in its home, or in ``buffers`` of its own if ``is_visit``.

    ``views`` are the indices of its tensors among the views of the buffers.
    """

    home: Home
    buffers: Sequence[FlatBuffer]
    views: Sequence[int]
    is_visit: bool = False


class FlatMemory:
    """The flat buffers of one optimizer."""

    def __init__(self) -> None:
        self.repointed: list[Tensor] = []
        """The parameters that were pointed to other memory since this list was cleared."""
        self.movers: set[int] = set()
        """The ids of parameters that will move into a home of their own when the next plan is made."""
        self._homes: list[Home] = []
        self._placements: dict[int, Placement] = {}

    def assign(self, buckets: Sequence[Bucket], state: states.State) -> None:
        """Find a place for each bucket in the homes there are. Units are compiled for the buffers of that place."""
        self._placements = {}
        used: set[int] = set()
        flat = [bucket for bucket in buckets if bucket.is_flat]
        for bucket in sorted(flat, key=lambda bucket: sum(bucket.flat_layout.sizes), reverse=True):
            found = self._find(bucket, state, used)
            if found is not None:
                self._placements[id(bucket)] = found

    def placement(self, bucket: Bucket) -> Placement:
        """Return the place of a bucket. Without one it gets a new home."""
        if id(bucket) not in self._placements:
            home = Home(bucket)
            self._placements[id(bucket)] = Placement(home, home.buffers, range(len(bucket.entries)))
        return self._placements[id(bucket)]

    def _find(self, bucket: Bucket, state: states.State, used: set[int]) -> Placement | None:
        for home in self._homes:
            if home.is_home_of(bucket):
                used.add(id(home))
                return Placement(home, home.buffers, range(len(bucket.entries)))
        size, params = sum(bucket.flat_layout.sizes), {id(entry.param) for entry in bucket.entries}
        for home in self._homes:
            views = home.places_of(bucket, state)
            if views is None:
                continue
            if id(home) not in used and 2 * size >= home.elements:
                used.add(id(home))
                bucket.flat_layout = home.bucket.flat_layout
                return Placement(home, home.buffers, views)
            if not params <= self.movers:
                buffers = [FlatBuffer(bucket, dtype) for dtype in bucket.dtypes]
                return Placement(home, buffers, range(len(bucket.entries)), is_visit=True)
        return None

    def repoint(self, targets: Mapping[Tensor, Tensor]) -> None:
        """Point parameters to the memory of other tensors, which hold the same values."""
        for param, target in targets.items():
            self.repointed.append(param)  # before it happens, because an interrupt may come in between
            param.data = target
            _placed[id(param)] = param.data_ptr()

    def settle(self, params: Sequence[Tensor], state: states.State, numbers: Collection[str]) -> None:
        """Keep the homes of the placed buckets, and others in which most tensors still lie.

        What is left of the rest gets memory of its own. Otherwise one parameter would keep a whole buffer in memory.
        """
        current = set(map(id, params))
        kept = {id(placement.home): placement.home for placement in self._placements.values()}
        left: list[Tensor] = []
        for home in self._homes:
            entries = [home.bucket.entries[i] for i in home.residents()]
            own = [entry.param for entry in entries if id(entry.param) in current]
            if id(home) not in kept and 2 * sum(param.numel() for param in own) < home.elements:
                left += own
            else:
                kept[id(home)] = home
        self._homes = list(kept.values())
        self.movers.clear()
        for param in left:
            if param in state:
                state[param] = states.copy_parts(state[param], numbers)
        self.repoint({param: param.detach().clone() for param in left})
