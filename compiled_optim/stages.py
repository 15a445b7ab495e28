"""The stages of a program: one ends wherever its rule needs sums over tensors, or means over matrices that are cut."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_optim.program import TensorLists
from compiled_optim.tensors import Tensors, mean, sum_dtype


class SplitMean(NamedTuple):
    """Means over a dimension that is split over shards: this dimension, and all that have the size 1 in the result."""

    dim: int
    ones: tuple[int, ...]


class Stopped(BaseException):
    """Ends a run on copies. No Exception, so that a rule does not catch it."""


class Stages:
    """The functions ``all_reduce`` and ``mean_over`` of a program. They record the stages.

    ``sums`` has the sums of each stage, none for a stage of means. Without ``totals`` the sums themselves are used,
    else those from ``totals``: stage by stage, in each stage first one sum for all tensors, then the next. Means over
    dimensions in ``split`` are read from the lists ``means``, in the order of the calls. The program ends in the stage
    with the number ``stop``; means of this stage are written to their list, as sums.
    """

    def __init__(
        self,
        totals: Tensor | Sequence[Tensor] | None,
        tensors: int,
        split: Sequence[int] = (),
        means: TensorLists = (),
        stop: int | None = None,
    ) -> None:
        parts = [totals] if isinstance(totals, Tensor) else totals or ()
        self._totals = None if totals is None else iter([total for part in parts for total in part.unbind()])
        self._tensors, self._split, self._means, self._stop = tensors, split, means, stop
        self.sums: list[list[Tensor]] = []
        self.means: list[SplitMean] = []
        self._local: list[Tensors] = []

    def all_reduce(self, *sums: Tensors) -> tuple[Tensors, ...]:
        """Return the sums over all shards."""
        if not sums:
            return ()
        self.sums.append([each for one in sums for each in one])
        if self._stops:
            raise Stopped
        if self._totals is None:
            return sums
        return tuple(Tensors(islice(self._totals, self._tensors)) for _ in sums)

    def mean_over(self, tensors: Tensors, dim: int) -> Tensors:
        """Return the means over a dimension and all shards."""
        if dim not in self._split:
            return tensors.map(partial(mean, dim))
        self.sums.append([])
        local = tensors.map(partial(torch.sum, dim=dim, keepdim=True, dtype=sum_dtype(tensors[0])))
        self._local.append(local)
        shape = local[0].shape
        ones = tuple(i - len(shape) for i, size in enumerate(shape) if is_one(size))
        self.means.append(SplitMean(dim, ones))  # read only where the sizes are numbers
        own = self._means[len(self.means) - 1] if self._means else None
        if self._stops:
            assert own is not None
            torch._foreach_copy_(own, local)
            raise Stopped
        return local if own is None else Tensors(each.to(tensors[0].dtype) for each in own)

    @property
    def results(self) -> list[Tensor]:
        """The sums of each stage of a program over one tensor."""
        local = iter(self._local)
        return [torch.stack(own) if own else next(local)[0] for own in self.sums]

    @property
    def _stops(self) -> bool:
        return len(self.sums) - 1 == self._stop


def is_one(size: Any) -> bool:
    """Return True if a size is 1, and not a symbol."""
    return isinstance(size, int) and size == 1
