"""Buckets of a rule that maps matrices: between two passes over all tensors, those of equal shape are mapped at once.

A step has three parts. The part PREPARE of the program writes what the rule passes to ``map_matrices`` to a workspace,
in the dtype of the map. Matrices of equal shape, after tall ones are transposed, are mapped as one stack. The part
APPLY updates parameters and states with the results. So only the number of different shapes matters, not that of the
matrices. Until APPLY nothing but the workspace is changed.

If parameters are sharded over processes, PREPARE and APPLY work on the shards. In between the processes exchange
matrices (``exchange``), so that each maps whole ones.

A bucket has a limited number of elements (``sorting.MATRIX_ELEMENTS``), and all buckets use the same workspace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from compiled_optim.backends import Backend
from compiled_optim.engine import layout
from compiled_optim.engine.bound import TensorBucket
from compiled_optim.engine.buckets import Bucket, Entry
from compiled_optim.engine.exchange import exchange_for
from compiled_optim.engine.matrix_map import MatrixMap
from compiled_optim.engine.rows import RowReader
from compiled_optim.engine.states import State

STACK_ELEMENTS = 1 << 24
"""The largest stack, in elements, unless a single matrix is larger. The map makes a few temporaries of this size."""

CPU_STACK_ELEMENTS = 1 << 20
"""The same for CPUs, where the temporaries should stay in the cache, and in memory that is not returned each time."""

ALIGNMENT = 64
"""In bytes. The matrices of one shape begin at a multiple of this."""


class Workspace:
    """The memory of the matrices of one bucket at a time, on each device and in each dtype."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        sizes: dict[tuple[torch.device, torch.dtype], int] = {}
        for bucket in buckets:
            if bucket.matrix_map is not None:
                key = bucket.device, bucket.matrix_map.dtype
                needed = Places(bucket).length
                if bucket.shards is not None:
                    needed += Places(bucket, exchange_for(bucket.entries, bucket.shards).mapped).length
                sizes[key] = max(sizes.get(key, 0), needed)
        self._memory = {key: torch.empty(size, dtype=key[1], device=key[0]) for key, size in sizes.items()}

    def of(self, bucket: Bucket) -> Tensor:
        """Return the memory for a bucket, a 1-D tensor in the dtype of its map."""
        assert bucket.matrix_map is not None
        return self._memory[bucket.device, bucket.matrix_map.dtype]


class Places:
    """The places of the tensors of a bucket in the workspace. Tensors with matrices of equal shape are neighbours.

    With ``wholes``, they are those of the whole tensors with these indices, behind the places of the shards.
    """

    def __init__(self, bucket: Bucket, wholes: Sequence[int] | None = None) -> None:
        assert bucket.matrix_map is not None
        entries = bucket.entries
        kinds = [_kind(entry, wholes is not None) for entry in entries]
        self.sizes = [entry.local.numel() for entry in entries]
        if wholes is not None:
            self.sizes = [entry.param.numel() if i in {*wholes} else 0 for i, entry in enumerate(entries)]
        self.order = sorted(range(len(entries)), key=kinds.__getitem__)
        self.offsets = [0] * len(entries)
        self.length = 0
        step, last = ALIGNMENT // bucket.matrix_map.dtype.itemsize, None
        for i in self.order:
            if kinds[i] != last:
                last, self.length = kinds[i], -(-self.length // step) * step
            self.offsets[i] = self.length
            self.length += self.sizes[i]

    def regions(self, memory: Tensor) -> list[Tensor]:
        """Return the part of ``memory`` that each tensor has."""
        return [memory[offset : offset + size] for offset, size in zip(self.offsets, self.sizes, strict=True)]


def _kind(entry: Entry, whole: bool) -> tuple[Any, ...]:
    """Return what the neighbours of a tensor in the workspace have in common: its matrices, and dense rows."""
    assert entry.cut is not None
    is_dense = whole or entry.local.is_contiguous()
    return (*entry.cut.sizes(entry.param.shape)[0][1:], len(entry.cut.parts), is_dense)


@dataclass
class Source:
    """Matrices in the workspace: a view with any number of dimensions, and the entry that each matrix belongs to.

    ``size`` is the number of matrices, of their rows and of their columns. ``scale`` is a factor of the results.
    """

    view: Tensor
    size: tuple[int, int, int]
    entries: list[int]
    scale: float = 1.0

    @property
    def is_tall(self) -> bool:
        """Whether the matrices have to be transposed."""
        return self.size[1] > self.size[2]

    def read(self) -> Tensor:
        """Return the matrices as a stack, tall ones transposed; a view if the memory permits it."""
        stack = self.view if self.view.shape == self.size else self.view.reshape(self.size)
        return stack.mT if self.is_tall else stack

    def write(self, results: Tensor) -> None:
        """Write results to the workspace."""
        if self.scale != 1.0:
            results = results * self.scale
        results = results.mT if self.is_tall else results
        self.view.copy_(results if results.shape == self.view.shape else results.reshape(self.view.shape))

    def part(self, start: int, stop: int) -> Source:
        """Return some of the matrices. Only for a view that is a stack itself."""
        return Source(self.view[start:stop], (stop - start, *self.size[1:]), self.entries[start:stop], self.scale)

    def chosen(self, present: Sequence[bool]) -> list[Source]:
        """Return the matrices of entries that are ``present``, those that follow each other in memory as one source."""
        runs = [(is_in, len(list(own))) for is_in, own in groupby(present[entry] for entry in self.entries)]
        if len(runs) == 1:  # always, if the view is no stack: it belongs to one entry then
            return [self] if runs[0][0] else []
        ends = [*accumulate(count for _, count in runs)]
        return [self.part(end - count, end) for (is_in, count), end in zip(runs, ends, strict=True) if is_in]


class Stack:
    """Matrices of equal shape that are mapped in one call."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources

    def map(self, function: MatrixMap, backend: Backend, present: Sequence[bool] | None) -> None:
        """Map the matrices of entries that are ``present``; None means all."""
        sources = self._sources
        if present is not None:
            sources = [part for source in sources for part in source.chosen(present)]
            if not sources:
                return
        parts = [source.read() for source in sources]
        # also a single tall one, so that the map gets dense matrices
        stack = parts[0] if len(parts) == 1 and not sources[0].is_tall else torch.cat(parts)
        results = backend.lower_map(function, stack)(stack)
        for source, own in zip(sources, torch.split(results, [len(part) for part in parts]), strict=True):
            source.write(own)


class MatrixBucket(TensorBucket):
    """A bucket of a rule that maps matrices."""

    def __init__(
        self,
        bucket: Bucket,
        readers: Sequence[RowReader],
        state: State,
        grads: Sequence[Tensor | None],
        workspace: Workspace,
    ) -> None:
        self._memory = workspace.of(bucket)
        super().__init__(bucket, readers, state, grads)

    def _place(
        self, values: Sequence[dict[str, Any]], initial: Sequence[Mapping[str, float | None]]
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        kept, lists = super()._place(values, initial)
        places, entries = Places(self.bucket), self.bucket.entries
        regions = places.regions(self._memory)
        self._views = [
            region.as_strided(entry.local.shape, layout.working_strides(entry.local, False))
            for entry, region in zip(entries, regions, strict=True)
        ]
        self._wholes, order = self._views, places.order
        self._exchange = None
        if self.bucket.shards is not None:
            self._exchange = exchange_for(entries, self.bucket.shards)
            whole = Places(self.bucket, self._exchange.mapped)
            own = whole.regions(self._memory[places.length :])
            self._wholes = [
                region.view(entry.param.shape if len(region) else (0,))
                for region, entry in zip(own, entries, strict=True)
            ]
            order = whole.order
        largest = CPU_STACK_ELEMENTS if self.bucket.device.type == "cpu" else STACK_ELEMENTS
        self._stacks = _stacks([source for i in order for source in _sources(i, entries[i], self._wholes[i])], largest)
        return kept, [*lists, regions]

    def _prepare_update(self, grads: Sequence[Tensor | None], first_stage: int) -> None:
        if not self.bucket.stages:
            self._load_copies()
        for stage in range(self.bucket.stages_before_map):
            self.measure(stage, grads)
        assert self._prepare is not None
        self._prepare(grads)
        self._map_matrices(grads)
        for stage in range(self.bucket.stages_before_map, len(self.bucket.stages)):
            self.measure(stage, grads)

    def _map_matrices(self, grads: Sequence[Tensor | None]) -> None:
        """Map the matrices in the workspace, of tensors that have a gradient."""
        assert self.bucket.matrix_map is not None
        present = [grad is not None for grad in grads]
        if self._exchange is not None:
            self._exchange.collect(self._views, self._wholes, present)
        for stack in self._stacks:
            stack.map(self.bucket.matrix_map, self.bucket.backend, None if all(present) else present)
        if self._exchange is not None:
            self._exchange.distribute(self._views, self._wholes, present)


def _sources(number: int, entry: Entry, tensor: Tensor) -> list[Source]:
    """Return the matrices of an entry. ``tensor`` is its place in the workspace."""
    assert entry.cut is not None
    if not tensor.numel():
        return []
    parts = zip(entry.cut.views(tensor), entry.cut.sizes(tensor.shape), entry.cut.parts, strict=True)
    return [
        Source(view.view(size) if view.is_contiguous() else view, size, [number] * size[0], part.scale)
        for view, size, part in parts
    ]


def _stacks(sources: Sequence[Source], largest: int) -> list[Stack]:
    """Return stacks of a limited number of elements. Neighbours in the workspace become one source."""
    by_shape: dict[tuple[int, ...], list[Source]] = {}
    for source in sources:
        by_shape.setdefault(tuple(sorted(source.size[1:])), []).append(source)
    stacks = []
    for (rows, columns), alike in by_shape.items():
        limit = max(1, largest // (rows * columns))
        chosen: list[Source] = []
        for source in _merged(alike):
            for part in _limited(source, limit):
                if sum(each.size[0] for each in chosen) + part.size[0] > limit and chosen:
                    stacks.append(Stack(chosen))
                    chosen = []
                chosen.append(part)
        stacks.append(Stack(chosen))
    return stacks


def _merged(sources: Sequence[Source]) -> list[Source]:
    """Return the sources, with those that follow each other in memory as one stack."""
    merged: list[Source] = []
    for source in sources:
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.size[1:], last.scale) == (source.size[1:], source.scale)
            and last.view.is_contiguous()
            and source.view.is_contiguous()
            and last.view.storage_offset() + last.view.numel() == source.view.storage_offset()
        ):
            size = (last.size[0] + source.size[0], *source.size[1:])
            view = last.view.as_strided(size, (size[1] * size[2], size[2], 1))
            merged[-1] = Source(view, size, [*last.entries, *source.entries], source.scale)
        else:
            merged.append(source)
    return merged


def _limited(source: Source, limit: int) -> list[Source]:
    """Return a source in parts of at most ``limit`` matrices, if its view is a stack."""
    count = source.size[0]
    if count <= limit or source.view.shape != source.size:
        return [source]
    return [source.part(start, min(start + limit, count)) for start in range(0, count, limit)]
