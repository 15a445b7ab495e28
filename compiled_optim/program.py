"""Programs: what a compiled unit computes, as a function over parallel lists of 1-D tensors.

A program is hashable and holds everything that changes its graph, so equal programs compile to equal graphs. The same
object is what runs in eager mode and what a backend compiles. The first list is always the gradients: they are new
tensors every step, while everything else is bound once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from compiled_optim.lists import TensorList, sum_dtype

TensorLists = Sequence[list[Tensor]]


class Program(Protocol):
    """A pure function over parallel lists (gradients first) and a few tensors that all of them share."""

    @property
    def name(self) -> str:
        """A short name for logs, profiles and ``explain()``."""

    def __call__(self, lists: TensorLists, shared: Sequence[Tensor]) -> Tensor | None:
        """Run the program; what it updates, it updates in place."""

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class UpdateProgram:
    """An optimizer's update rule over ``[grads, params, *states]`` with ``[scalars]`` or ``[scalars, grad_scale]``.

    The scalars are one 1-D tensor, or a 0-dim tensor each in its place.
    The rule sees its tensors in the dtype of the scalars, which is float32 or better: low-precision parameters and
    states are widened on the way in and rounded once on the way out.
    """

    name: str = field(compare=False)
    update: Callable[..., None]
    states: tuple[str, ...]
    scalars: tuple[str, ...]
    options: tuple[tuple[str, bool], ...]
    scaled: bool

    def __call__(self, lists: TensorLists, shared: Sequence[Tensor]) -> None:
        """Apply the rule once, in place."""
        dtype = shared[0].dtype
        scalars = shared[0].unbind() if shared[0].ndim else shared[: len(self.scalars)]
        homes = lists[1:]
        grads: TensorList = _widen(lists[0], dtype)
        if self.scaled:
            grads = torch._foreach_mul(grads, shared[-1])
        work = [_widen(home, dtype) for home in homes]
        self.update(
            work[0],
            grads,
            **dict(zip(self.states, work[1:], strict=True)),
            **dict(zip(self.scalars, scalars, strict=True)),
            **dict(self.options),
        )
        for home, result in zip(homes, work, strict=True):
            if home[0].dtype != dtype:
                torch._foreach_copy_(home, result)


@dataclass(frozen=True)
class SquaredNormProgram:
    """The sum of the squares of all gradients: squared in ``dtype``, summed in :func:`sum_dtype`."""

    dtype: torch.dtype
    name: str = "squared_norm"

    def __call__(self, lists: TensorLists, shared: Sequence[Tensor]) -> Tensor:
        """Return the sum as a 0-dim tensor."""
        # tensor by tensor: Inductor does not fuse a foreach operation into the reduction that follows it
        squares = [grad * grad for grad in _widen(lists[0], self.dtype)]
        return torch.stack([square.sum(dtype=sum_dtype(square)) for square in squares]).sum()


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a rule works on tensors of ``dtype``: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _widen(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [tensor.to(dtype) for tensor in tensors]
