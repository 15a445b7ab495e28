"""Parameters that are sharded over processes (``DTensor``): each process steps the shard it holds.

The engine works on local tensors. This module returns the local tensors, and all-reduces sums over shards.

Limit: all processes have to step the same parameters. If a parameter has a gradient in one process and none in another,
collectives may hang, as everywhere in torch.distributed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiled_optim.engine.tensor_types import PLAIN_TYPES, as_dtensor, has_dtensor, is_dtensor, is_wrapper, local_shard
from compiled_optim.program_checks import is_elementwise, sum_stages
from compiled_optim.update_program import MEAN_OVER, UpdateProgram, reduced_shape, takes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


Splits = tuple[tuple[int, tuple[int, ...]], ...]
"""Dimensions of a tensor, and for each the dimensions of the mesh over which it is split."""


@dataclass(frozen=True)
class ShardSpec:
    """The mesh of a tensor, and the mesh dimensions it is sharded over. It is replicated over the others."""

    mesh: DeviceMesh
    dims: tuple[int, ...]

    @classmethod
    def from_tensor(cls, param: Tensor) -> ShardSpec | None:
        """Return the ShardSpec of a parameter, or None if this process holds all of it."""
        if not is_dtensor(param):
            return None
        dims = tuple(i for i, placement in enumerate(_placements(param)) if not placement.is_replicate())
        return cls(as_dtensor(param).device_mesh, dims) if dims else None

    def all_reduce_(self, sums: Tensor) -> None:
        """All-reduce sums over local shards to sums over all shards, in place."""
        for dim in self.dims:
            torch.distributed.all_reduce(sums, group=self.mesh.get_group(dim))


def local_grads(params: Sequence[Tensor], names: Callable[[], Sequence[str]]) -> list[Tensor | None]:
    """Return the local shards of the gradients, with the placements of their parameters.

    This is a collective operation if a gradient has to be redistributed.
    """
    grads = [param.grad for param in params]
    if not has_dtensor(grads):
        return grads
    found: list[Tensor | None] = []
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if grad is not None and is_dtensor(grad) != is_dtensor(param):
            kinds = ["a DTensor" if is_dtensor(tensor) else "a plain tensor" for tensor in (grad, param)]
            raise RuntimeError(
                f"the gradient of {names()[i]} is {kinds[0]}, but the parameter is {kinds[1]}; "
                "set its .grad to None and run backward() again"
            )
        if grad is not None and is_dtensor(grad) and _placements(grad) != _placements(param):
            grad = as_dtensor(grad).redistribute(placements=_placements(param))
        found.append(grad if grad is None else local_shard(grad))
    return found


def redistributed(params: Sequence[Tensor]) -> list[Tensor]:
    """Return the local tensors of the gradients that :func:`local_grads` redistributes, as they are in ``p.grad``."""
    pairs = [(param, param.grad) for param in params if param.grad is not None and is_dtensor(param.grad)]
    return [local_shard(grad) for param, grad in pairs if _placements(grad) != _placements(param)]


def placement(tensor: Tensor, ones: Sequence[int] = ()) -> tuple[Any, ...]:
    """Return the mesh and placements of a DTensor; an empty tuple for a plain tensor.

    In the dimensions in ``ones``, negative numbers, it is taken to be replicated.
    """
    return (as_dtensor(tensor).device_mesh, *_placements(tensor, ones)) if is_dtensor(tensor) else ()


def matrix_splits(param: Tensor) -> Splits:
    """Return the last two dimensions that are split over processes, each with the dimensions of the mesh."""
    cuts = enumerate(_placements(param))
    split = [(cut.dim % param.ndim - param.ndim, i) for i, cut in cuts if not cut.is_replicate()]
    found = ((dim, tuple(i for other, i in split if other == dim)) for dim in (-2, -1))
    return tuple((dim, dims) for dim, dims in found if dims)


def shard_sizes(param: Tensor) -> set[int]:
    """Return the numbers of elements that the processes hold of a parameter. Every process gets the same set.

    A process cannot see which shards the others have, but what it decides about buckets has to hold for all.
    """
    if not is_dtensor(param):
        return {param.numel()}
    mesh, cuts = as_dtensor(param).device_mesh, _placements(param)
    found = {1}
    for dim, size in enumerate(param.shape):
        own = [i for i, cut in enumerate(cuts) if getattr(cut, "dim", None) in (dim, dim - param.ndim)]
        sizes = {size}
        if any(hasattr(cuts[i], "split_factor") for i in own):  # the parts are those of another order of the cuts
            ranks = math.prod(mesh.size(i) for i in own)
            sizes = {size // ranks if size % ranks == 0 else 0}
        else:
            for i in own:
                sizes = {part for each in sizes for part in _parts(each, mesh.size(i))}
        found = {some * each for some in found for each in sizes}
    return found


def _parts(size: int, ranks: int) -> set[int]:
    """Return the sizes of the parts into which torch cuts a dimension, as ``torch.chunk`` does."""
    largest = -(-size // ranks)
    if not largest:
        return {0}
    rest, has_empty = size % largest, -(-size // largest) < ranks
    return {largest, *([rest] if rest else []), *([0] if has_empty else [])}


def shard_like(param: Tensor, shard: Tensor, ones: Sequence[int] = ()) -> Tensor:
    """Return a DTensor with the placements of ``param`` and the local tensor ``shard``; for a plain one, ``shard``.

    In the dimensions in ``ones``, negative numbers, it has the size 1 and is replicated.
    """
    if not is_dtensor(param):
        return shard
    where = {"device_mesh": as_dtensor(param).device_mesh, "placements": _placements(param, ones)}
    shape, stride = param.shape, param.stride()
    if ones:
        shape = torch.Size(reduced_shape(shape, *ones))
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    made: Tensor = type(as_dtensor(param)).from_local(shard, **where, run_check=False, shape=shape, stride=stride)
    return made


def gathered(param: Tensor, shard: Tensor) -> Tensor:
    """Return the whole tensor of which each process holds a shard like that of ``param``. A collective operation."""
    whole: Tensor = as_dtensor(shard_like(param, shard)).full_tensor()
    return whole


def shard_of(param: Tensor, whole: Tensor) -> Tensor:
    """Return the shard that this process holds of a tensor that all have, with the placements of ``param``."""
    mesh, replicated = as_dtensor(param).device_mesh, [_replicate()] * as_dtensor(param).device_mesh.ndim
    made = type(as_dtensor(param)).from_local(whole, mesh, replicated, run_check=False)
    return local_shard(made.redistribute(placements=_placements(param)))


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def check_supported(optimizer: str, name: str, param: Tensor, program: UpdateProgram, rank: int) -> None:
    """Raise if a parameter cannot be stepped shard by shard, or is an unsupported tensor subclass.

    ``rank`` is the number of dimensions in which the program sees it.
    """
    if not is_dtensor(param):
        if type(param) not in PLAIN_TYPES and is_wrapper(param):
            raise TypeError(
                f"{optimizer} cannot step {name}: it is a {type(param).__name__}, a tensor that wraps other tensors; "
                "only DTensor is supported"
            )
        return
    placements = _placements(param)
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"{optimizer} cannot step {name}: its placements {placements} are partial, so no process has its values; "
            "redistribute it to Shard or Replicate first"
        )
    across = [placement for placement in placements if not placement.is_replicate() and placement.dim % param.ndim]
    if rank == 2 and across:
        raise ValueError(
            f"{optimizer} cannot step {name}: it needs whole rows, but the placements {placements} split rows; "
            "shard the parameter along dimension 0"
        )
    if ShardSpec.from_tensor(param) is None:
        return
    if rank > 2 and not takes(program.update, MEAN_OVER):
        raise ValueError(
            f"{optimizer} cannot step {name}, which is sharded over processes: its update() sees whole matrices, but "
            f"the placements are {placements}; compute means by an argument mean_over of update()"
        )
    if program.reduces:
        sum_stages(program, rank)  # raises if it cannot be run
    elif not is_elementwise(program, rank):  # with the identity in place of a map of matrices
        raise ValueError(
            f"{optimizer} cannot step {name}, which is sharded over processes: its update() combines elements of a "
            "tensor; add an argument all_reduce to update() and pass the sums to all_reduce(...)"
        )


def _placements(tensor: Tensor, ones: Sequence[int] = ()) -> tuple[Any, ...]:
    placements: tuple[Any, ...] = as_dtensor(tensor).placements
    if not ones:
        return placements
    return tuple(
        cut if cut.is_replicate() or cut.dim % tensor.ndim - tensor.ndim not in ones else _replicate()
        for cut in placements
    )
