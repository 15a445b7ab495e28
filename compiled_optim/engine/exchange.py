"""Bring the shards of matrices together in one process, and the results back to all of them.

Parameters that are sharded over one dimension of a mesh are distributed: each process of that dimension maps some of
the matrices. Shards and results are sent by one all-to-all each, whatever the number of tensors. Other placements, such
as shards over two dimensions, are gathered: one collective for each tensor, and every process maps all matrices.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.engine.buckets import Entry
from compiled_optim.engine.sharding import ShardSpec, gathered, shard_of
from compiled_optim.engine.tensor_types import as_dtensor


class Exchange(ABC):
    """Moves matrices between the shards of this process and whole tensors."""

    mapped: Sequence[int]
    """The indices of the entries whose matrices this process maps."""

    @abstractmethod
    def collect(self, shards: Sequence[Tensor], wholes: Sequence[Tensor], present: Sequence[bool]) -> None:
        """Write the whole tensors of :attr:`mapped` from the shards of all processes."""

    @abstractmethod
    def distribute(self, shards: Sequence[Tensor], wholes: Sequence[Tensor], present: Sequence[bool]) -> None:
        """Write the shards of this process from the whole tensors of all processes."""


def exchange_for(entries: Sequence[Entry], spec: ShardSpec) -> Exchange:
    """Return the exchange for parameters with this ShardSpec. All processes get the same kind."""
    from torch.distributed.tensor import Shard

    placements = [as_dtensor(entry.param).placements[spec.dims[0]] for entry in entries]
    if len(spec.dims) == 1 and all(type(placement) is Shard for placement in placements):
        dims = [placement.dim % entry.param.ndim for placement, entry in zip(placements, entries, strict=True)]
        return Distributed(entries, spec, dims)
    return Gathered(entries)


class Gathered(Exchange):
    """Every process gets all matrices."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._params = [entry.param for entry in entries]
        self.mapped = range(len(entries))

    def collect(self, shards: Sequence[Tensor], wholes: Sequence[Tensor], present: Sequence[bool]) -> None:
        """Gather the tensors that are ``present``."""
        for i in [i for i in self.mapped if present[i]]:
            wholes[i].copy_(gathered(self._params[i], shards[i]))

    def distribute(self, shards: Sequence[Tensor], wholes: Sequence[Tensor], present: Sequence[bool]) -> None:
        """Take the own shards of the tensors that are ``present``."""
        for i in [i for i in self.mapped if present[i]]:
            shards[i].copy_(shard_of(self._params[i], wholes[i]))


class Distributed(Exchange):
    """Every process gets the matrices of which it is the owner. Absent tensors are sent too, with any values."""

    def __init__(self, entries: Sequence[Entry], spec: ShardSpec, dims: Sequence[int]) -> None:
        (mesh_dim,) = spec.dims
        self._group: Any = spec.mesh.get_group(mesh_dim)
        self._rank, ranks = spec.mesh.get_local_rank(mesh_dim), range(spec.mesh.size(mesh_dim))
        self._dims = dims
        shapes = [entry.param.shape for entry in entries]
        owners = balanced(shapes, len(ranks), entries[0].index)
        self._owned = [[i for i, owner in enumerate(owners) if owner == rank] for rank in ranks]
        self.mapped = self._owned[self._rank]
        # of each entry, for each process: how many indices of the sharded dimension it has
        self._counts = [_chunk_sizes(shape[dim], len(ranks)) for shape, dim in zip(shapes, dims, strict=True)]
        self._per_index = [_product_without(shape, dim) for shape, dim in zip(shapes, dims, strict=True)]
        self._here = [sum(self._elements(i, self._rank) for i in owned) for owned in self._owned]
        self._there = [sum(self._elements(i, rank) for i in self.mapped) for rank in ranks]

    def collect(self, shards: Sequence[Tensor], wholes: Sequence[Tensor], present: Sequence[bool]) -> None:
        """Send the shards to the owners."""
        sent = _flat([shards[i] for owned in self._owned for i in owned], shards[0])
        received = self._exchanged(sent, self._here, self._there)
        pieces: dict[int, list[Tensor]] = {i: [] for i in self.mapped}
        for rank, part in enumerate(torch.split(received, self._there)):
            sizes = [self._elements(i, rank) for i in self.mapped]
            for i, piece in zip(self.mapped, torch.split(part, sizes), strict=True):
                shape = [*wholes[i].shape]
                shape[self._dims[i]] = self._counts[i][rank]
                pieces[i].append(piece.view(shape))
        for i, own in pieces.items():
            torch.cat(own, self._dims[i], out=wholes[i])

    def distribute(self, shards: Sequence[Tensor], wholes: Sequence[Tensor], present: Sequence[bool]) -> None:
        """Send the results of the owners to all processes."""
        cut = {i: torch.split(wholes[i], self._counts[i], self._dims[i]) for i in self.mapped}
        sent = _flat([cut[i][rank] for rank in range(len(self._owned)) for i in self.mapped], shards[0])
        received = self._exchanged(sent, self._there, self._here)
        order = [i for owned in self._owned for i in owned]
        pieces = torch.split(received, [self._elements(i, self._rank) for i in order])
        own = [piece.view(shards[i].shape) for i, piece in zip(order, pieces, strict=True)]
        torch._foreach_copy_([shards[i] for i in order], own)

    def _elements(self, entry: int, rank: int) -> int:
        """Return the number of elements in the shard that a process has of an entry."""
        return self._counts[entry][rank] * self._per_index[entry]

    def _exchanged(self, sent: Tensor, sizes: Sequence[int], expected: Sequence[int]) -> Tensor:
        """Send parts of these sizes to all processes; return the parts that they have sent."""
        received = sent.new_empty(sum(expected))
        # as bytes, because not every library for communication has every dtype
        torch.distributed.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [size * sent.itemsize for size in expected],
            [size * sent.itemsize for size in sizes],
            group=self._group,
        )
        return received


def balanced(shapes: Sequence[Sequence[int]], ranks: int, start: int) -> list[int]:
    """Return an owner for each tensor: largest first, each to the process that has the fewest elements.

    The first process is that with the number ``start``, so that several buckets do not all begin with the same one.
    """
    loads, owners = [0] * ranks, [0] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: -math.prod(shapes[i])):
        place = loads.index(min(loads))
        loads[place] += math.prod(shapes[i])
        owners[i] = (start + place) % ranks
    return owners


def _chunk_sizes(size: int, ranks: int) -> list[int]:
    """Return the sizes of the shards of a dimension, which DTensor cuts like ``torch.chunk``."""
    chunk = -(-size // ranks)
    return [max(0, min(chunk, size - rank * chunk)) for rank in range(ranks)]


def _product_without(shape: Sequence[int], dim: int) -> int:
    return math.prod(size for i, size in enumerate(shape) if i != dim)


def _flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the elements of all tensors in one dimension."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like.new_empty(0)
