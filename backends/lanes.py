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
        """Split a list of tensors, given by their shapes, into calls; return the lane and the indices of each call."""

    def units(self, batch: Batch) -> list[UnitCall]:
        """Return a call for each lane."""
        rank = len(batch.shapes[0])
        calls = []
        cuts = _cut_flat(batch.shapes) if batch.is_flat else self.cut(batch.shapes)
        for lane, indices in cuts:
            arguments = tuple(
                # the totals of a batch have a column for each tensor; a unit takes those of its lane, sum by sum
                spec._replace(shape=(spec.shape[0] * (lane.width or len(indices)),)) if spec.name == "totals" else spec
                for spec in batch.arguments
            )
            signature = Signature(batch.program, batch.device, rank, batch.dtypes, arguments, lane)
            calls.append(UnitCall(signature, indices))
        return calls

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
        if finishes:
            assert arguments.totals is not None
            return _FinishBatch(calls, arguments.totals, totals, places)
        if batch.program.result is Result.SUMS:
            assert arguments.totals is not None
            return _MeasureBatch(calls, arguments.totals, places)
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


class _MeasureBatch(BoundBatch):
    """Writes the sums of all tensors into ``totals``, in the order of the batch's tensors."""

    def __init__(self, calls: Sequence[BoundCall], totals: Tensor, places: Sequence[Tensor]) -> None:
        super().__init__(calls)
        self._totals, self._places = totals, places

    def __call__(self, grads: Sequence[Tensor | None]) -> Tensor:
        self._totals.zero_()
        for (_, _, pick, call), places in zip(self.calls, self._places, strict=True):
            measured = call(pick(grads))
            assert measured is not None
            self._totals[:, places] = measured.view(len(self._totals), -1)[:, : len(places)]
        return self._totals


class _FinishBatch(BoundBatch):
    """Copies to each call the totals of its tensors, then runs the calls."""

    def __init__(
        self, calls: Sequence[BoundCall], totals: Tensor, parts: Sequence[Tensor], places: Sequence[Tensor]
    ) -> None:
        super().__init__(calls)
        self._totals, self._parts, self._places = totals, parts, places

    def __call__(self, grads: Sequence[Tensor | None]) -> None:
        for part, places in zip(self._parts, self._places, strict=True):
            part.view(len(self._totals), -1)[:, : len(places)] = self._totals[:, places]
        super().__call__(grads)
