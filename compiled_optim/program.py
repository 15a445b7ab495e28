"""Programs: what a compiled unit computes, as a function over parallel lists of tensors.

A program is hashable and holds everything that changes its graph, so equal programs compile to equal graphs. Eager
mode runs the same object that a backend compiles. The first list is always the gradients, which are new tensors every
step; everything else is bound once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from compiled_optim.locations import is_ours
from compiled_optim.storage import Direct, Storage
from compiled_optim.tensors import AllReduce, Scalar, Tensors, sum_dtype

TensorLists = Sequence[list[Tensor]]

ScalarValues: TypeAlias = Tensor | Sequence[Tensor] | Sequence[float]
"""Hyperparameters: a 1-D tensor or 0-dim tensors, every value and then one minus every value; or Python numbers."""


class Arguments(NamedTuple):
    """What a program takes beside its lists; None where it does not take it.

    ``grad_scale`` is a 0-dim tensor that gradients are multiplied by. ``totals`` are a rule's sums over whole tensors,
    sum by sum for all tensors, for the second phase of a rule over sharded tensors.
    """

    scalars: ScalarValues | None = None
    grad_scale: Tensor | None = None
    totals: Tensor | None = None


class Result(Enum):
    """What a program returns."""

    NOTHING = "nothing"
    SUM = "one sum over all its tensors, as a 0-dim tensor; a bound batch returns those of its calls, as a 1-D tensor"
    SUMS = "sums over each tensor, sum by sum, as a 1-D tensor"


class Program(Protocol):
    """A pure function over parallel lists (gradients first) and a few arguments that all tensors share."""

    @property
    def name(self) -> str:
        """A short name for logs, profiles and ``explain()``."""

    @property
    def variant(self) -> tuple[str, ...]:
        """Words that distinguish it from other programs of the same name."""
        return ()

    @property
    def result(self) -> Result:
        """What it returns."""
        return Result.NOTHING

    @property
    def reduces(self) -> bool:
        """Whether it sums over tensors."""
        return False

    def __call__(self, lists: TensorLists, arguments: Arguments) -> Tensor | None:
        """Run the program; what it updates, it updates in place."""

    def __hash__(self) -> int: ...


class Phase(Enum):
    """Which part of a rule a program runs; see :class:`UpdateProgram`."""

    WHOLE = "whole"
    MEASURE = "measure"
    FINISH = "finish"


@dataclass(frozen=True)
class UpdateProgram:
    """An optimizer's update rule over ``[grads, params, *states]``.

    The rule sees its tensors in ``dtype``, which is float32 or float64; ``storages``, of the parameters and of each
    state, convert from and to what is kept in memory. No storages means that everything is kept in ``dtype``.

    A rule that sums over tensors passes its sums through its argument ``all_reduce``. Over tensors that are sharded,
    such a rule runs twice. MEASURE runs it on copies and returns the sums over this process's shards; what does not
    contribute to them, a compiler leaves out. FINISH runs it again with the sums over all shards, from ``totals``.
    """

    name: str = field(compare=False)
    update: Callable[..., None]
    states: tuple[str, ...]
    scalars: tuple[str, ...]
    flags: tuple[tuple[str, bool], ...]
    scaled: bool
    dtype: torch.dtype = torch.float32
    storages: tuple[Storage, ...] = ()
    phase: Phase = Phase.WHOLE

    @property
    def reduces(self) -> bool:
        """Whether the rule sums over tensors."""
        return takes_all_reduce(self.update)

    @property
    def is_separable(self) -> bool:
        """Whether parts of a 1-D tensor may be updated one by one, with the rule's sums added up before.

        True for this package's rules, which are tested so. Of users' rules it is not known.
        """
        return is_ours(self.update)

    @property
    def variant(self) -> tuple[str, ...]:
        """Whether it scales gradients, and the phase if there are two."""
        phase = () if self.phase is Phase.WHOLE else (self.phase.value,)
        return ("scaled", *phase) if self.scaled else phase

    @property
    def result(self) -> Result:
        """Sums if it only measures."""
        return Result.SUMS if self.phase is Phase.MEASURE else Result.NOTHING

    def __call__(self, lists: TensorLists, arguments: Arguments) -> Tensor | None:
        """Apply the rule once, in place; or only measure, and change nothing."""
        if self.phase is Phase.MEASURE:
            return torch.stack(self.measure(lists, arguments))
        totals, known = arguments.totals, self.phase is Phase.FINISH
        self._run(lists, arguments, _KnownSums(totals, len(lists[0])) if known else _RecordedSums())
        return None

    def measure(self, lists: TensorLists, arguments: Arguments) -> list[Tensor]:
        """Return the sums the rule takes, sum by sum for all tensors; nothing is changed."""
        recorded = _RecordedSums()
        copies = [[tensor.clone() for tensor in tensors] for tensors in lists[1:]]
        self._run([lists[0], *copies], arguments, recorded)
        return recorded.sums

    def _run(self, lists: TensorLists, arguments: Arguments, all_reduce: AllReduce) -> None:
        kept = lists[1:]
        storages = self.storages or (Direct(),) * len(kept)
        grads = Tensors(grad.to(self.dtype) for grad in lists[0])
        if self.scaled:
            assert arguments.grad_scale is not None
            grads = grads * arguments.grad_scale
        params, *states = (storage.load(each, self.dtype) for storage, each in zip(storages, kept, strict=True))
        self.update(
            params,
            grads,
            **dict(zip(self.states, states, strict=True)),
            **self._numbers(arguments.scalars),
            **dict(self.flags),
            **({"all_reduce": all_reduce} if self.reduces else {}),
        )
        for storage, each, result in zip(storages, kept, (params, *states), strict=True):
            storage.store(each, result)

    def _numbers(self, values: ScalarValues | None) -> Mapping[str, Any]:
        """Return the hyperparameters by name, as numbers or as Scalar objects."""
        given = values.unbind() if isinstance(values, Tensor) else values or ()
        count = len(self.scalars)
        if len(given) == count:  # Python numbers
            return dict(zip(self.scalars, given, strict=True))
        pairs = zip(given[:count], given[count:], strict=True)
        return {
            name: Scalar(value, complement)  # type: ignore[arg-type]
            for name, (value, complement) in zip(self.scalars, pairs, strict=True)
        }


@lru_cache(maxsize=1024)
def takes_all_reduce(update: Callable[..., None]) -> bool:
    """Return True if a rule sums over tensors: it has an argument ``all_reduce``."""
    return "all_reduce" in inspect.signature(update).parameters


@lru_cache(maxsize=256)
def count_sums(program: UpdateProgram, rank: int) -> int:
    """Return how many sums a rule takes over each tensor with ``rank`` dimensions, by running it once."""
    lists = [[torch.ones((2,) * rank, device="cpu")] for _ in range(2 + len(program.states))]
    return len(program.measure(lists, example_arguments(program)))


def example_arguments(program: UpdateProgram) -> Arguments:
    """Return arguments to try a program with: all ones, on the CPU, in float32."""
    return Arguments(torch.ones(2 * len(program.scalars), device="cpu"), torch.ones((), device="cpu"))


class _RecordedSums:
    """Records a rule's sums, sum by sum for all tensors, and returns them as they are."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []

    def __call__(self, *sums: Tensors) -> tuple[Tensors, ...]:
        if self.sums:
            raise TypeError("update() calls all_reduce() more than once; pass all sums in one call, as several lists")
        self.sums = [each for one in sums for each in one]
        return sums


class _KnownSums:
    """Returns known totals, in the order in which :class:`_RecordedSums` recorded their parts."""

    def __init__(self, totals: Tensor | None, tensors: int) -> None:
        assert totals is not None
        self._totals, self._tensors = totals.unbind(), tensors

    def __call__(self, *sums: Tensors) -> tuple[Tensors, ...]:
        n = self._tensors
        return tuple(Tensors(self._totals[i * n : (i + 1) * n]) for i in range(len(sums)))


@dataclass(frozen=True)
class SquaredNormProgram:
    """The sum of the squares of all gradients: squared in ``dtype``, summed in :func:`sum_dtype`."""

    dtype: torch.dtype
    name: str = "squared_norm"
    variant: tuple[str, ...] = ()
    result: Result = Result.SUM
    reduces: bool = True

    def __call__(self, lists: TensorLists, arguments: Arguments) -> Tensor:
        """Return the sum as a 0-dim tensor."""
        # tensor by tensor: Inductor does not fuse a foreach operation into the reduction that follows it
        squares = [grad * grad for grad in (grad.to(self.dtype) for grad in lists[0])]
        return torch.stack([square.sum(dtype=sum_dtype(square)) for square in squares]).sum()
