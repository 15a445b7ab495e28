"""Programs: what a compiled unit computes, as a function over parallel lists of 1-D tensors.

A program is hashable and holds everything that changes its graph, so equal programs compile to equal graphs. The same
object is what runs in eager mode and what a backend compiles. The first list is always the gradients: they are new
tensors every step, while everything else is bound once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from compiled_optim.lists import Sums, TensorList, Total, sum_dtype

TensorLists = Sequence[list[Tensor]]


class Program(Protocol):
    """A pure function over parallel lists (gradients first) and a few tensors that all of them share."""

    @property
    def name(self) -> str:
        """A short name for logs, profiles and ``explain()``."""

    @property
    def variant(self) -> tuple[str, ...]:
        """Words that tell it from others of the same name."""
        return ()

    def __call__(self, lists: TensorLists, shared: Sequence[Tensor]) -> Tensor | None:
        """Run the program; what it updates, it updates in place."""

    def __hash__(self) -> int: ...


class Phase(Enum):
    """Which part of a rule a program is; see :class:`UpdateProgram`."""

    WHOLE = "whole"
    MEASURE = "measure"
    FINISH = "finish"


@dataclass(frozen=True)
class UpdateProgram:
    """An optimizer's update rule over ``[grads, params, *states]`` with ``[scalars, grad_scale, totals]``.

    The scalars are one 1-D tensor, or a 0-dim tensor each in its place; the others are there if the program is
    ``scaled`` and in its last phase. The rule sees its tensors in the dtype of the scalars, which is float32 or better:
    low-precision parameters and states are widened on the way in and rounded once on the way out.

    Where tensors are split over processes, a rule that takes sums over a whole tensor is run twice. It says so by an
    argument ``total``, through which it passes its sums. In the first phase it only gets that far, and the program
    returns the sums over this process's shards; in the second it gets those over all shards, from ``totals``. What a
    phase does not need, a compiler leaves out.
    """

    name: str = field(compare=False)
    update: Callable[..., None]
    states: tuple[str, ...]
    scalars: tuple[str, ...]
    options: tuple[tuple[str, bool], ...]
    scaled: bool
    phase: Phase = Phase.WHOLE
    takes_total: bool = field(init=False, compare=False)

    @property
    def variant(self) -> tuple[str, ...]:
        """Whether it scales gradients, and the phase if there are two."""
        phase = () if self.phase is Phase.WHOLE else (self.phase.value,)
        return ("scaled", *phase) if self.scaled else phase

    def __post_init__(self) -> None:
        # not while it is traced
        object.__setattr__(self, "takes_total", "total" in inspect.signature(self.update).parameters)

    def __call__(self, lists: TensorLists, shared: Sequence[Tensor]) -> Tensor | None:
        """Apply the rule once, in place; or only measure, and change nothing."""
        if self.phase is Phase.MEASURE:
            return torch.stack(self.take(lists, shared))
        total: Total = _Known(shared[-1], len(lists[0])) if self.phase is Phase.FINISH else _own
        homes = lists[1:]
        work = self._run(lists, homes, shared, total)
        for home, result in zip(homes, work, strict=True):
            if home[0].dtype != result[0].dtype:
                torch._foreach_copy_(home, result)
        return None

    def take(self, lists: TensorLists, shared: Sequence[Tensor]) -> list[Tensor]:
        """The sums the rule takes, tensor by tensor for each; nothing is changed."""
        taken = _Taken()
        self._run(lists, [[tensor.clone() for tensor in tensors] for tensors in lists[1:]], shared, taken)
        return taken.sums

    def _run(
        self, lists: TensorLists, homes: TensorLists, shared: Sequence[Tensor], total: Total
    ) -> list[list[Tensor]]:
        """Run the rule on these homes; returns what it worked on, which is the homes unless they were widened."""
        dtype = shared[0].dtype
        scalars = shared[0].unbind() if shared[0].ndim else shared[: len(self.scalars)]
        grads: TensorList = _widen(lists[0], dtype)
        if self.scaled:
            grads = torch._foreach_mul(grads, shared[-2 if self.phase is Phase.FINISH else -1])
        work = [_widen(home, dtype) for home in homes]
        self.update(
            work[0],
            grads,
            **dict(zip(self.states, work[1:], strict=True)),
            **dict(zip(self.scalars, scalars, strict=True)),
            **dict(self.options),
            **({"total": total} if self.takes_total else {}),
        )
        return work


@lru_cache(maxsize=256)
def count_sums(program: UpdateProgram, rank: int) -> int:
    """How many sums a rule takes over each tensor of so many dimensions: found out by letting it take them."""
    scalar = torch.ones((), device="cpu")
    lists = [[torch.ones((2,) * rank, device="cpu")] for _ in range(2 + len(program.states))]
    return len(program.take(lists, [scalar] * (len(program.scalars) + 1)))


def _own(*sums: Sums) -> tuple[Sums, ...]:
    """The totals where no tensor is split."""
    return sums


class _Taken:
    """Takes note of the sums, tensor by tensor for each, and hands them back."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []

    def __call__(self, *sums: Sums) -> tuple[Sums, ...]:
        if self.sums:
            raise TypeError("update() calls total() more than once; pass all sums in one call, as several lists")
        self.sums = [each for one in sums for each in one]
        return sums


class _Known:
    """Answers with the totals of so many tensors, laid out as :class:`_Taken` took their parts."""

    def __init__(self, totals: Tensor, tensors: int) -> None:
        self._totals, self._tensors = totals.unbind(), tensors

    def __call__(self, *sums: Sums) -> tuple[Sums, ...]:
        n = self._tensors
        return tuple([*self._totals[i * n : (i + 1) * n]] for i in range(len(sums)))


@dataclass(frozen=True)
class SquaredNormProgram:
    """The sum of the squares of all gradients: squared in ``dtype``, summed in :func:`sum_dtype`."""

    dtype: torch.dtype
    name: str = "squared_norm"
    variant: tuple[str, ...] = ()

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
