"""Parameters that are split over processes (``DTensor``): each process steps the shard it holds.

Everything behind the optimizer works on the local tensors; this module is where they are found, and where sums over
shards become sums over tensors. All processes have to step the same parameters: one that has a gradient in one process
and none in another would leave the others waiting, as everywhere in torch.distributed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from compiled_optim.program import UpdateProgram, count_sums

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PLAIN = {Tensor, torch.nn.Parameter, type(None)}


@dataclass(frozen=True)
class Split:
    """Over which dimensions of which mesh a tensor is split; in the others every process has the same."""

    mesh: DeviceMesh
    dims: tuple[int, ...]

    @classmethod
    def of(cls, param: Tensor) -> Split | None:
        """How a parameter is split, or None if this process has all of it."""
        if not is_dtensor(param):
            return None
        dims = tuple(i for i, placement in enumerate(_placements(param)) if not placement.is_replicate())
        return cls(_dtensor(param).device_mesh, dims) if dims else None

    def add_up(self, sums: Tensor) -> None:
        """Replace the sums over this process's shards by those over all of them, in place."""
        for dim in self.dims:
            torch.distributed.all_reduce(sums, group=self.mesh.get_group(dim))


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor may be split."""
    if type(tensor) in PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # if nobody has imported it, there are none
    return module is not None and isinstance(tensor, module.DTensor)


def any_dtensor(tensors: Sequence[Tensor | None]) -> bool:
    """The same of many, at hardly any cost where there are none."""
    return not PLAIN.issuperset(map(type, tensors)) and any(map(is_dtensor, filter(torch.is_tensor, tensors)))


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: itself, or its shard."""
    if not is_dtensor(tensor):
        return tensor
    shard: Tensor = _dtensor(tensor)._local_tensor
    wait = getattr(shard, "wait", None)  # the result of a collective that is still under way
    return wait() if wait is not None else shard


def local_grads(
    params: Sequence[Tensor], grads: Sequence[Tensor | None], names: Callable[[], Sequence[str]]
) -> list[Tensor | None]:
    """What this process holds of the gradients, split as their parameters are; collective if one has to be made so."""
    found: list[Tensor | None] = []
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if grad is not None and is_dtensor(grad) != is_dtensor(param):
            kinds = ["a DTensor" if is_dtensor(tensor) else "a plain tensor" for tensor in (grad, param)]
            raise RuntimeError(
                f"the gradient of {names()[i]} is {kinds[0]}, but the parameter is {kinds[1]}; "
                "set its .grad to None and run backward() again"
            )
        if grad is not None and is_dtensor(grad) and _placements(grad) != _placements(param):
            grad = _dtensor(grad).redistribute(placements=_placements(param))
        found.append(grad if grad is None else local(grad))
    return found


def placed(tensor: Tensor) -> tuple[Any, ...]:
    """On which mesh a tensor is, and how it is split over it; nothing of a plain one."""
    return (_dtensor(tensor).device_mesh, *_placements(tensor)) if is_dtensor(tensor) else ()


def like(param: Tensor, shard: Tensor) -> Tensor:
    """A tensor of which this process holds ``shard``, split as a parameter is."""
    if not is_dtensor(param):
        return shard
    where = {"device_mesh": _dtensor(param).device_mesh, "placements": _placements(param)}
    made: Tensor = type(_dtensor(param)).from_local(
        shard, **where, run_check=False, shape=param.shape, stride=param.stride()
    )
    return made


def refuse(optimizer: str, name: str, param: Tensor, program: UpdateProgram, rowwise: bool) -> None:
    """Raise if a parameter cannot be stepped shard by shard, or is a kind of tensor nothing is known about."""
    if not is_dtensor(param):
        wrapper: object = param  # mypy takes the check below for impossible
        if type(param) not in PLAIN and is_traceable_wrapper_subclass(wrapper):
            raise TypeError(
                f"{optimizer} cannot step {name}: it is a {type(param).__name__}, a tensor made of other tensors; "
                "of these only DTensor is supported"
            )
        return
    placements = _placements(param)
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"{optimizer} cannot step {name}: as a DTensor with placements {placements} no process has its values; "
            "redistribute it to Shard or Replicate first"
        )
    across = [placement for placement in placements if not placement.is_replicate() and placement.dim % param.ndim]
    if rowwise and param.ndim > 1 and across:
        raise ValueError(
            f"{optimizer} cannot step {name}: it looks at whole rows, and placements {placements} cut through them; "
            "shard the parameter along dimension 0"
        )
    rank = 1 + (rowwise and param.ndim > 1)
    if Split.of(param) is None:
        return
    if program.takes_total:
        count_sums(program, rank)  # raises if it cannot be run in two phases
    elif not works_by_element(program, rank):
        raise ValueError(
            f"{optimizer} cannot step {name}, which is split over processes: its update() mixes elements of a tensor; "
            "let it take an argument total and pass its sums through total(...)"
        )


@lru_cache(maxsize=256)
def works_by_element(program: UpdateProgram, rank: int) -> bool:
    """Whether a rule does the same to a tensor of so many dimensions as to its parts, found out by trying.

    Parts are of whole rows: no rule by rows is given others.
    """
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu") + 0.5

    lists = [some(6, *(3,) * (rank - 1)) for _ in range(2 + len(program.states))]
    scalars = [some() / 2 for _ in range(len(program.scalars) + 1)]
    whole = [[tensor.clone()] for tensor in lists]
    parts = [[tensor[:2].clone(), tensor[2:].clone()] for tensor in lists]
    program(whole, scalars)
    program(parts, scalars)
    return all(torch.allclose(one, torch.cat(several), rtol=1e-4) for (one,), several in zip(whole, parts, strict=True))


def _placements(tensor: Tensor) -> tuple[Any, ...]:
    placements: tuple[Any, ...] = _dtensor(tensor).placements
    return placements


def _dtensor(tensor: Tensor) -> Any:
    return tensor
