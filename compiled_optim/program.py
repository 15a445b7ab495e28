"""Programs: the functions that backends compile, over parallel lists of tensors.

A program is hashable and holds everything that changes its graph, so equal programs compile to equal graphs. Eager
mode runs the same object that a backend compiles. The first list contains the gradients, which are new tensors in every
step. Everything else is bound once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from compiled_optim.tensors import sum_dtype

TensorLists = Sequence[list[Tensor]]

ScalarValues: TypeAlias = Tensor | Sequence[Tensor] | Sequence[float]
"""Hyperparameters: Python numbers; or a 1-D tensor or 0-dim tensors with all values, then one minus each value."""


class Arguments(NamedTuple):
    """The arguments of a program in addition to its lists; None for those it does not take.

    ``inv_scale`` and ``grad_scale`` are 0-dim tensors by which gradients are multiplied, one after the other.
    ``totals`` are sums over whole tensors (:class:`~compiled_optim.update_program.UpdateProgram`), stage by stage, in
    a stage first one sum for all tensors, then the next. They are one tensor, or one for each stage.
    ``row_segments`` and ``mask`` describe the rows of a flat buffer, see
    :class:`~compiled_optim.flat_tensors.Segments`. If ``found_inf``, a 0-dim tensor, is not 0, nothing is changed.
    """

    scalars: ScalarValues | None = None
    inv_scale: Tensor | None = None
    grad_scale: Tensor | None = None
    totals: Tensor | Sequence[Tensor] | None = None
    row_segments: Tensor | None = None
    mask: Tensor | None = None
    found_inf: Tensor | None = None


class Result(Enum):
    """The kind of result a program returns."""

    NOTHING = "nothing"
    SUM = "one sum over all its tensors, as a 0-dim tensor; a bound batch returns those of its parts, as a 1-D tensor"
    SUMS = "sums over each tensor, sum by sum, as a 1-D tensor; a bound batch returns a row for each sum"


class Program(Protocol):
    """A pure function over parallel lists (gradients first) and a few arguments that all tensors share."""

    @property
    def name(self) -> str:
        """A short name for logs, profiles and ``explain()``."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the program computes."""

    @property
    def variant(self) -> tuple[str, ...]:
        """Words that distinguish the program from others of the same name."""
        return ()

    @property
    def result(self) -> Result:
        """The kind of result the program returns."""
        return Result.NOTHING

    @property
    def reduces(self) -> bool:
        """Whether the program sums over tensors."""
        return False

    @property
    def runs_on_empty(self) -> bool:
        """Whether the program has to run on tensors without elements too."""
        return False

    @property
    def row_lists(self) -> tuple[int, ...]:
        """The numbers of the lists that have a number for each row of a 2-D tensor, or for each block of a 1-D one."""
        return ()

    @property
    def has_blocks(self) -> bool:
        """Whether a unit sees 1-D tensors as 2-D ones, with a block of elements in each row."""
        return False

    def list_shape(self, number: int, shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape of a tensor in the list with this number, if that of the parameter is ``shape``."""
        return tuple(shape)

    def __call__(self, lists: TensorLists, arguments: Arguments) -> Tensor | None:
        """Run the program; it updates tensors in place."""

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class SquaredNormProgram:
    """The sum of the squares of all gradients: squared in ``dtype``, summed in :func:`sum_dtype`."""

    dtype: torch.dtype
    name: str = "squared_norm"
    variant: tuple[str, ...] = ()
    result: Result = Result.SUM
    reduces: bool = True
    runs_on_empty: bool = False
    row_lists: tuple[int, ...] = ()
    has_blocks: bool = False

    def list_shape(self, number: int, shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape itself."""
        return tuple(shape)

    def __call__(self, lists: TensorLists, arguments: Arguments) -> Tensor:
        """Return the sum as a 0-dim tensor."""
        # tensor by tensor: Inductor does not fuse a foreach operation into the reduction that follows it
        squares = [grad * grad for grad in (grad.to(self.dtype) for grad in lists[0])]
        return torch.stack([square.sum(dtype=sum_dtype(square)) for square in squares]).sum()
