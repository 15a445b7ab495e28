"""The base of the backends for NPUs and for eager mode: split a batch into calls of units, combine their results."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_optim.backends.base import (
    Backend,
    Batch,
    BoundArguments,
    BoundBatch,
    BoundCall,
    Lane,
    Shape,
    Signature,
    UnitCall,
)
from compiled_optim.program import Result, TensorLists
from compiled_optim.tensors import picker


class LaneBackend(Backend):
    """A backend that splits a batch into lanes. A subclass defines the split (``cut``) and compiles (``compile``)."""

    @abstractmethod
    def cut(self, shapes: Sequence[Shape]) -> list[tuple[Lane, list[int]]]:
        """Split a list of tensors, given by their shapes, into calls; return the lane and the indices of each call.

        The list is not empty, and has only tensors that need a call.
        """

    def units(self, batch: Batch) -> list[UnitCall]:
        """Return a call for each lane."""
        rank = len(batch.shapes[0])
        calls = []
        cuts = _cut_flat(batch.shapes) if batch.is_flat else self._cut_some(batch)
        for lane, indices in cuts:
            arguments = tuple(
                # the totals of a batch have a column for each tensor; a unit takes those of its lane, sum by sum
                spec._replace(shape=(spec.shape[0] * (lane.width or len(indices)),)) if spec.name == "totals" else spec
                for spec in batch.arguments
            )
            signature = Signature(batch.program, batch.device, rank, batch.dtypes, arguments, lane)
            calls.append(UnitCall(signature, indices))
        return calls

    def _cut_some(self, batch: Batch) -> list[tuple[Lane, list[int]]]:
        """Split the tensors of a batch, without empty ones that need no call."""
        kept = [i for i, shape in enumerate(batch.shapes) if batch.program.runs_on_empty or 0 not in shape]
        cuts = self.cut([batch.shapes[i] for i in kept]) if kept else []
        return [(lane, [kept[i] for i in indices]) for lane, indices in cuts]

    def bind(self, batch: Batch, lists: TensorLists, arguments: BoundArguments) -> BoundBatch:
        """Bind the unit of each call to its part of the lists."""
        finishes = any(spec.name == "totals" for spec in batch.arguments)
        calls, totals = [], []
        for signature, indices in batch.calls:
            own = arguments
            if finishes:
                assert arguments.totals is not None
                (shape,) = (spec.shape for spec in signature.arguments if spec.name == "totals")
                totals.append(arguments.totals.new_zeros(shape))
                own = arguments._replace(totals=totals[-1])
            part = [[tensors[i] for i in indices] for tensors in lists]
            unit = self.get_unit(signature)
            call = unit.bind([batch.shapes[i] for i in indices], part, own)
            calls.append(BoundCall(unit, signature, picker(indices), call))
        places = [torch.tensor(indices, device=batch.device) for _, indices in batch.calls]
        if finishes or batch.program.result is Result.SUMS:
            return _StageBatch(calls, arguments.totals, totals, places, len(batch.shapes), batch.program.result)
        return _SumBatch(calls) if batch.program.result is Result.SUM else BoundBatch(calls)


def _cut_flat(shapes: Sequence[Shape]) -> list[tuple[Lane, list[int]]]:
    """Return a call for each part of a flat buffer."""
    return [(Lane("flat", 1, (tuple(shape),)), [i]) for i, shape in enumerate(shapes)]


class _SumBatch(BoundBatch):
    """Returns the sums of all calls as one 1-D tensor, or None without calls."""

    def __call__(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        sums = [result for _, _, pick, call in self.calls if (result := call(pick(grads))) is not None]
        if len(sums) == 1:
            return sums[0].view(1)  # no copy, so no kernel launch
        return torch.stack(sums) if sums else None


class _StageBatch(BoundBatch):
    """Copies to each call the totals of its tensors, if the calls take totals, then runs the calls.

    Returns their sums, if they return any: a row for each sum and a column for each tensor; or None without calls.
    """

    def __init__(
        self,
        calls: Sequence[BoundCall],
        totals: Tensor | None,
        parts: Sequence[Tensor],
        places: Sequence[Tensor],
        tensors: int,
        result: Result,
    ) -> None:
        super().__init__(calls)
        self._totals, self._parts, self._places = totals, parts, places
        self._tensors, self._returns_sums = tensors, result is Result.SUMS

    def __call__(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        for part, places in zip(self._parts, self._places, strict=bool(self._parts)):
            assert self._totals is not None
            part.view(len(self._totals), -1).copy_(self._totals[:, places])
        if not self._returns_sums:
            return super().__call__(grads)
        sums = None
        for (_, _, pick, call), places in zip(self.calls, self._places, strict=True):
            measured = call(pick(grads))
            assert measured is not None
            own = measured.view(-1, len(places))
            if sums is None:
                sums = own.new_zeros(len(own), self._tensors)
            sums[:, places] = own
        return sums
