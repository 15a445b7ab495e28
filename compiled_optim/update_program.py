"""The program of an update rule: load tensors, prepare gradients, run the rule, store the results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from compiled_optim.cautious import Caution, check_updates
from compiled_optim.flat_tensors import FlatTensors, Segments
from compiled_optim.locations import is_ours
from compiled_optim.noise import Noise
from compiled_optim.program import Arguments, Result, ScalarValues, TensorLists
from compiled_optim.stages import SplitMean, Stages, Stopped
from compiled_optim.storage import Direct, Storage
from compiled_optim.tensors import AllReduce, BlockTensors, Number, Scalar, Tensors, materialize

FUNCTIONS = ALL_REDUCE, MEAN_OVER, MAP_MATRICES = "all_reduce", "mean_over", "map_matrices"
"""The functions that a rule may take as keyword arguments; see :class:`UpdateProgram`."""

MAX_NORM, EMA_DECAY, SEED, SHRINK = "max_grad_norm_per_parameter", "ema_decay", "seed", "decoupled_shrink"
"""Scalars that the program uses itself. The rule does not get them."""

EMA = "ema"
"""The state that holds the average of a parameter."""

MapMatrices: TypeAlias = Callable[[Tensors], Tensors]
"""Takes tensors of matrices, and returns the results of the map."""


def _unchanged(tensors: Tensors) -> Tensors:
    return tensors


class Phase(Enum):
    """What a program does about sums over tensors; see :class:`UpdateProgram`."""

    WHOLE = "whole"
    MEASURE = "measure"
    AVERAGE = "average"
    FINISH = "finish"
    STAGED = "staged"


class Part(Enum):
    """Which part of a rule that maps matrices a program runs; see :class:`UpdateProgram`."""

    WHOLE = "whole"
    PREPARE = "prepare"
    APPLY = "apply"


@dataclass(frozen=True)
class UpdateProgram:
    """An optimizer's update rule over ``[grads, params, *states, *companions]``.

    The rule gets its tensors in ``dtype``, float32 or float64. ``storages``, one for the parameters and one for each
    state, convert between ``dtype`` and memory. Without storages everything is kept in ``dtype``. ``companions`` are
    the names of the further lists that storages keep, in the order of the storages. A storage that rounds
    stochastically takes its random bits from the scalar SEED.

    A program that ``unscales`` multiplies gradients by ``inv_scale`` and writes them back. A ``scaled`` one multiplies
    them by ``grad_scale`` for its own use, after that. With the scalar MAX_NORM, the gradient of each tensor is clipped
    by its own norm. With the scalar EMA_DECAY, the last state is EMA, the moving average of the parameters. With the
    scalar SHRINK, parameters are multiplied by it before the rule. A ``cautious`` program masks the rule's update, of
    the parameters and of the states in ``weights``.

    Sums over tensors are passed to ``all_reduce``: those of the rule, of the norm of each gradient, and of the mask of
    a cautious program. Each call is a stage, and what follows may depend on its sums. On sharded tensors a program runs
    several times. MEASURE runs it on copies as far as the stage with the number ``stage``, and returns the sums of that
    stage over the local shards; ``totals`` has the sums of the stages before, over all shards. FINISH runs it with the
    sums of all stages from ``totals``. STAGED is only traced, over one tensor, by :meth:`staged`: it returns the
    sums of each stage, also those of means, and continues with those from ``totals`` and with the means from the lists,
    so that a backend can split the graph into one pass over the tensors for each stage.

    A rule with matrices computes means over their rows or columns by ``mean_over``. Over the dimensions in ``split``,
    -1 or -2, matrices are split over shards, so each such call is a stage too. AVERAGE runs the program on copies as
    far as this stage, and writes the sums over the local shards to a list. The engine makes them the means over all
    shards, and later stages read them there. ``means`` describes these lists, which are the last ones.

    A rule that maps matrices passes tensors to its argument ``map_matrices``. It runs twice, with one more list at the
    end. The part PREPARE writes the tensors to that list, and changes nothing else. Then the engine maps the matrices
    in it (``engine.matrices``). APPLY runs the rule again, and reads the results from the list. The part WHOLE is only
    for checks of a rule: its matrices stay as they are.

    ``reduced`` are the numbers of the lists of states that have the size 1 in a dimension, and that dimension.

    With ``segments``, each list has one tensor: a flat buffer of this many segments, as a matrix. With ``has_blocks``,
    a unit sees 1-D tensors as 2-D ones, with a block of a quantised state in each row.
    """

    name: str = field(compare=False)
    update: Callable[..., None]
    states: tuple[str, ...]
    scalars: tuple[str, ...]
    flags: tuple[tuple[str, bool], ...]
    scaled: bool
    unscales: bool = False
    dtype: torch.dtype = torch.float32
    storages: tuple[Storage, ...] = ()
    companions: tuple[str, ...] = ()
    cautious: bool = False
    weights: tuple[str, ...] = ()
    reduced: tuple[tuple[int, int], ...] = ()
    split: tuple[int, ...] = ()
    means: tuple[SplitMean, ...] = ()
    phase: Phase = Phase.WHOLE
    stage: int = 0
    part: Part = Part.WHOLE
    segments: int = 0
    has_blocks: bool = False

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of all lists after the parameters: the states, then the companions."""
        return (*self.states, *self.companions)

    @property
    def row_lists(self) -> tuple[int, ...]:
        """The numbers of the companions that have a number for each row or block."""
        by_rows = [storage.by_rows for storage in self.storages for _ in storage.companions]
        first = 2 + len(self.states)
        return tuple(first + i for i, is_by_rows in enumerate(by_rows) if is_by_rows)

    def list_shape(self, number: int, shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape of a tensor in the list with this number, if that of the parameter is ``shape``."""
        if number in self.row_lists:
            return tuple(shape[:1])
        place = number - (2 + len(self.kept) + (self.part is not Part.WHOLE))
        if place >= 0 and self.means:
            return reduced_shape(shape, *self.means[place].ones)
        return reduced_shape(shape, *(dim for own, dim in self.reduced if own == number))

    @property
    def plain(self) -> UpdateProgram:
        """The same program with everything kept in the dtype in which it computes."""
        return replace(self, storages=(), companions=()) if self.storages else self

    @property
    def reduces(self) -> bool:
        """Whether the program sums over tensors."""
        return takes(self.update, ALL_REDUCE) or MAX_NORM in self.scalars or self.cautious

    @property
    def maps_matrices(self) -> bool:
        """Whether the program maps matrices, so that it has one more list in the parts PREPARE and APPLY."""
        return takes(self.update, MAP_MATRICES)

    @property
    def is_separable(self) -> bool:
        """Whether parts of a 1-D tensor can be updated one by one, after the rule's sums over all parts are added.

        True for the rules of this package, which are tested for it. For other rules it is unknown.
        """
        return is_ours(self.update) and not self.reduced

    @property
    def runs_on_empty(self) -> bool:
        """Whether it runs on tensors without elements too: the shard may be empty, but not the means over all."""
        return bool(self.split)

    @property
    def variant(self) -> tuple[str, ...]:
        """Words for logs: how tensors are kept, how gradients are scaled, and what part of the rule it runs."""
        kept = dict.fromkeys(storage.word for storage in self.storages if storage.word)
        words = {"cautious": self.cautious, "unscales": self.unscales, "scaled": self.scaled}
        words |= {self.part.value: self.part is not Part.WHOLE, self.phase.value: self.phase is not Phase.WHOLE}
        words |= {f"stage {self.stage}": self.stage > 0, f"split over {self.split}": bool(self.split)}
        return (*kept, *(word for word, applies in words.items() if applies))

    @property
    def result(self) -> Result:
        """SUMS in the phase that returns sums, else NOTHING."""
        return Result.SUMS if self.phase is Phase.MEASURE else Result.NOTHING

    def __call__(self, lists: TensorLists, arguments: Arguments) -> Tensor | None:
        """Apply the rule once, in place. MEASURE changes nothing and returns the sums of its stage."""
        if self.phase in (Phase.MEASURE, Phase.AVERAGE):
            sums = self.run_stages(lists, arguments, self.stage).sums
            return torch.stack(sums[-1]) if self.phase is Phase.MEASURE else None
        self._apply(lists, arguments)
        return None

    def staged(self, lists: TensorLists, arguments: Arguments) -> list[Tensor]:
        """Apply the rule once to one tensor, in place, and return the sums of each stage."""
        return self._apply(lists, arguments).results

    def _apply(self, lists: TensorLists, arguments: Arguments) -> Stages:
        """Apply the rule, and return the stages."""
        lists, stages = self._without_means(lists, arguments)
        if self.part is Part.PREPARE:
            self._run_on_copies(lists, arguments, stages)
        elif self.part is Part.APPLY:
            self._run_unless_skipped(lists[:-1], arguments, stages, self._mapped(lists[-1]))
        else:
            self._run_unless_skipped(lists, arguments, stages)
        return stages

    def run_stages(self, lists: TensorLists, arguments: Arguments, stop: int | None = None) -> Stages:
        """Run the rule as far as the stage ``stop``, and return the stages. This changes no parameter and no state."""
        lists, stages = self._without_means(lists, arguments, stop)
        self._run_on_copies(lists, arguments, stages)
        return stages

    def _without_means(
        self, lists: TensorLists, arguments: Arguments, stop: int | None = None
    ) -> tuple[TensorLists, Stages]:
        """Return the lists without those of means, and the stages, which have them."""
        count = len(lists) - len(self.means)
        return lists[:count], Stages(arguments.totals, len(lists[0]), self.split, lists[count:], stop)

    def _run_on_copies(self, lists: TensorLists, arguments: Arguments, stages: Stages) -> None:
        """Run the rule on copies, as far as the stage where ``stages`` stops; PREPARE as far as the map of matrices."""
        map_matrices: MapMatrices = _unchanged
        if self.part is not Part.WHOLE:
            *lists, matrices = lists
            map_matrices = partial(_write_and_stop, matrices) if self.part is Part.PREPARE else self._mapped(matrices)
        with suppress(Stopped):
            self._run(self._copies(lists), arguments, stages, map_matrices)

    def _mapped(self, matrices: list[Tensor]) -> MapMatrices:
        """Return a function that returns the results of the map, which are in the last list."""
        mapped = Tensors(tensor.to(self.dtype) for tensor in matrices)
        return lambda _: mapped

    def _copies(self, lists: TensorLists) -> TensorLists:
        """Return copies of all lists that the program writes to."""
        grads = [grad.clone() for grad in lists[0]] if self.unscales else lists[0]
        return [grads, *([tensor.clone() for tensor in tensors] for tensors in lists[1:])]

    def _run_unless_skipped(
        self, lists: TensorLists, arguments: Arguments, stages: Stages, map_matrices: MapMatrices = _unchanged
    ) -> None:
        """Run the rule, and restore all tensors if ``found_inf`` is not 0. The value is not read on the host."""
        if arguments.found_inf is None:
            self._run(lists, arguments, stages, map_matrices)
            return
        before = [[tensor.clone() for tensor in tensors] for tensors in lists]
        self._run(lists, arguments, stages, map_matrices)
        is_finite = arguments.found_inf == 0
        for tensors, old in zip(lists, before, strict=True):
            torch._foreach_copy_(tensors, [torch.where(is_finite, *pair) for pair in zip(tensors, old, strict=True)])

    def _run(
        self, lists: TensorLists, arguments: Arguments, stages: Stages, map_matrices: MapMatrices = _unchanged
    ) -> None:
        kept, companions = lists[1 : 2 + len(self.states)], iter(lists[2 + len(self.states) :])
        storages = self.storages or (Direct(),) * len(kept)
        own = [[next(companions) for _ in storage.companions] for storage in storages]
        numbers = self._numbers(arguments.scalars)
        max_norm, decay, seed, shrink = (numbers.pop(name, None) for name in (MAX_NORM, EMA_DECAY, SEED, SHRINK))
        noise = None
        if any(storage.uses_noise for storage in storages):
            assert seed is not None
            noise = Noise(lists[0], kept[0], seed)
        as_list = self._list_type(arguments)
        grads = as_list(grad.to(self.dtype) for grad in lists[0])
        if self.unscales:
            assert arguments.inv_scale is not None
            grads = grads * arguments.inv_scale
            torch._foreach_copy_(lists[0], grads)
        if self.scaled:
            assert arguments.grad_scale is not None
            grads = grads * arguments.grad_scale
        parts = zip(storages, kept, own, strict=True)
        loaded = [storage.load(each, extra, self.dtype) for storage, each, extra in parts]
        params, *states = map(as_list, loaded)
        named = dict(zip(self.states, states, strict=True))
        average = None if decay is None else named.pop(EMA)
        if max_norm is not None:
            grads = _clipped(grads, max_norm, stages.all_reduce)
        functions = {ALL_REDUCE: stages.all_reduce, MEAN_OVER: stages.mean_over, MAP_MATRICES: map_matrices}
        functions = {name: function for name, function in functions.items() if takes(self.update, name)}
        if shrink is not None:
            params *= shrink
        if self.cautious:
            caution = Caution(grads, stages.all_reduce)
            masked = {name: caution.masked(named[name]) for name in self.weights}
            given = caution.masked(params)
            self.update(given, grads, **{**named, **masked}, **numbers, **dict(self.flags), **functions)
            check_updates(given, self.update)
        else:
            self.update(params, grads, **named, **numbers, **dict(self.flags), **functions)
        if average is not None:
            average.ema_(params, decay)
        place = 0
        for storage, each, extra, result in zip(storages, kept, own, (params, *states), strict=True):
            storage.store(each, extra, result, noise, place)
            place += storage.uses_noise

    def _list_type(self, arguments: Arguments) -> Callable[[Iterable[Tensor]], Tensors]:
        """Return the function that makes the lists that the rule works on."""
        if not self.segments:
            return BlockTensors if self.has_blocks else Tensors
        assert arguments.row_segments is not None
        segments = Segments(self.segments, arguments.row_segments, arguments.mask)
        return partial(FlatTensors, segments=segments)

    def _numbers(self, values: ScalarValues | None) -> dict[str, Any]:
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


def _clipped(grads: Tensors, max_norm: Number, all_reduce: AllReduce) -> Tensors:
    """Return gradients, each clipped to a norm of ``max_norm``, as ``clip_grad_norm_`` does for one parameter."""
    (squares,) = all_reduce(grads.sum_of_squares())

    def factor(square: Tensor) -> Tensor:
        scaled = 1.0 / (square.sqrt() + 1e-6) * getattr(max_norm, "tensor", max_norm)
        return materialize(scaled.clamp(max=1.0).to(grads[0].dtype))

    return grads * squares.map(factor)


def reduced_shape(shape: Sequence[Any], *dims: int) -> tuple[Any, ...]:
    """Return a shape with the size 1 in some dimensions, given as negative numbers."""
    return tuple(1 if i - len(shape) in dims else size for i, size in enumerate(shape))


@lru_cache(maxsize=1024)
def takes(update: Callable[..., None], function: str) -> bool:
    """Return True if a rule has this function as an argument: ALL_REDUCE, MEAN_OVER or MAP_MATRICES."""
    return function in inspect.signature(update).parameters


def _write_and_stop(target: list[Tensor], values: Tensors) -> Tensors:
    """Write tensors to a list, and stop the program."""
    torch._foreach_copy_(target, values)
    raise Stopped
