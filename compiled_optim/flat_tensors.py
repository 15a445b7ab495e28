"""Lists of tensors that are one flat buffer, with the operators of :class:`~compiled_optim.tensors.Tensors`.

The buffer is a matrix. Each of its rows belongs to one segment, and a segment is one tensor of the optimizer. A sum
over each tensor is a sum over rows and then over segments. It is broadcast back by one gather of a value for each row,
which is cheap because rows are long. So a rule makes the same number of operations for any number of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from compiled_optim.tensors import Tensors, sum_dtype


class Level(IntEnum):
    """The number of values in a list: one for each segment, row or element. A higher level has more values."""

    SEGMENTS = 0
    ROWS = 1
    ELEMENTS = 2


class Segments:
    """The segments of the rows of a matrix.

    Args:
        count: the number of segments.
        of_row: the number of the segment of each row. Padding rows belong to a segment that no tensor has.
        mask: the elements that belong to a tensor; None if there is no padding within rows.
    """

    def __init__(self, count: int, of_row: Tensor, mask: Tensor | None) -> None:
        self.count = count
        self.of_row = of_row
        self._mask = mask

    def without_padding(self, matrix: Tensor) -> Tensor:
        """Return a matrix in which padding is zero. It may be NaN, if a rule divides by an epsilon of zero."""
        return matrix if self._mask is None else torch.where(self._mask, matrix, 0.0)

    def sum(self, rows: Tensor) -> Tensor:
        """Return the sum of the values of the rows of each segment."""
        return rows.new_zeros(self.count).index_add(0, self.of_row, rows)


class FlatTensors(Tensors):
    """A list of one tensor, which holds the values of all segments at one level.

    A list at a lower level is broadcast if it is combined with one at a higher level.
    """

    def __init__(self, tensors: Iterable[Tensor], segments: Segments, level: Level = Level.ELEMENTS) -> None:
        super().__init__(tensors)
        self.segments = segments
        self.level = level

    def map(self, function: Callable[..., Tensor], *others: Sequence[Any]) -> Tensors:
        """Return the result of a function of this tensor and others, after all were broadcast to the highest level."""
        level = max(each.level for each in (self, *others) if isinstance(each, FlatTensors))
        values = [each._at(level) if isinstance(each, FlatTensors) else each for each in (self, *others)]
        return FlatTensors((function(*each) for each in zip(*values, strict=True)), self.segments, level)

    def sum_of_squares(self) -> Tensors:
        """Return the sum of the squares of each segment."""
        matrix = self.segments.without_padding(self[0])
        return self._rows((matrix * matrix).sum(dim=1, dtype=sum_dtype(matrix))).total()

    def row_sums(self, other: Tensors) -> Tensors:
        """Return the sum of ``self * other`` over each row."""
        (sums,) = super().row_sums(other)
        return self._rows(sums)

    def total(self, dtype: torch.dtype | None = None) -> Tensors:
        """Return the sum of the rows of each segment."""
        (rows,) = self
        sums = self.segments.sum(rows if dtype is None else rows.to(dtype))
        return FlatTensors([sums], self.segments, Level.SEGMENTS)

    def as_columns(self) -> Tensors:
        """Return the list itself: it is broadcast where it is combined with elements."""
        return self

    def _rows(self, values: Tensor) -> FlatTensors:
        return FlatTensors([values], self.segments, Level.ROWS)

    def _at(self, level: Level) -> list[Tensor]:
        """Return the values, broadcast to a level that is not lower."""
        (values,) = self
        if self.level == Level.SEGMENTS and level > Level.SEGMENTS:
            values = values.index_select(0, self.segments.of_row)
        if level == Level.ELEMENTS and self.level < Level.ELEMENTS:
            values = values.unsqueeze(1)
        return [values]

    def _like(self, tensors: Iterable[Tensor]) -> Tensors:
        return FlatTensors(tensors, self.segments, self.level)

    def _combined(self, operation: Callable[..., Any], other: Any) -> Tensors:
        if not isinstance(other, FlatTensors):
            return self._like(operation(self, other))
        level = max(self.level, other.level)
        return FlatTensors(operation(self._at(level), other._at(level)), self.segments, level)

    def _operand(self, other: Any) -> Any:
        return other._at(self.level) if isinstance(other, FlatTensors) else other
