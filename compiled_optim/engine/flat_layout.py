"""The places of tensors in flat buffers, and the parts of a buffer that one call takes.

Tensors lie one after the other, each at an aligned offset. The gaps and the end of a buffer are padding. A rule that
works on each element alone runs over chunks of a few fixed lengths, so that the units of one model serve all others. A
rule that sums over tensors, or works by rows, runs over the whole buffer as a matrix (``flat_tensors``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from compiled_optim.backends.base import Shape
from compiled_optim.engine import layout
from compiled_optim.engine.tensor_types import PLAIN_TYPES, has_memory

ALIGNMENT = 256
"""Offsets are multiples of this number of elements, which are 512 bytes in the narrowest dtypes."""

CHUNKS = tuple(1 << bits for bits in range(26, 13, -2))
"""The lengths of chunks, in elements. The factor of 4 means at most three chunks of each length but the largest."""

WIDTH = 1024
"""The length of the rows of a matrix, for rules that do not work by rows. A tensor takes whole rows."""

MARK = "compiled_optim_flat"
"""The attribute of a storage that is a flat buffer of this package: an object that no other storage has. It lives as
long as the storage, and copies of the storage do not have it."""


@dataclass(frozen=True)
class FlatLayout:
    """The places of tensors in a buffer.

    ``parts`` are the shapes of the parts of the buffer that are passed to calls, in their order. ``segments`` is the
    number of segments if the buffer is a matrix, else 0. ``width`` is the length of its rows, and ``is_padded`` tells
    whether the last row of a tensor may contain padding.
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    parts: tuple[Shape, ...]
    segments: int = 0
    width: int = 0
    is_padded: bool = False

    @classmethod
    def in_chunks(cls, sizes: Sequence[int]) -> FlatLayout:
        """Return the layout for a rule that works on each element alone."""
        offsets, end = _place(sizes, ALIGNMENT)
        parts = []
        for length in CHUNKS:
            count, end = divmod(end, length)
            parts += [(length,)] * count
        if end:
            parts.append((CHUNKS[-1],))
        return cls(tuple(sizes), offsets, tuple(parts))

    @classmethod
    def as_matrix(cls, sizes: Sequence[int], width: int | None) -> FlatLayout:
        """Return the layout for a rule that sums over tensors. With a ``width``, all tensors have rows of this length.

        The numbers of rows and segments are rounded up, so that similar lists of tensors have units in common.
        """
        is_padded, width = width is None, width or WIDTH
        offsets, end = _place(sizes, math.lcm(ALIGNMENT, width))
        rows = _rounded(end // width)
        segments = 1 << len(sizes).bit_length()  # at least one more than there are tensors: that of padding
        return cls(tuple(sizes), offsets, ((rows, width),), segments, width, is_padded)

    @cached_property
    def length(self) -> int:
        """The number of elements of a buffer."""
        return sum(map(math.prod, self.parts))

    def row_segments(self) -> list[int]:
        """Return the segment of each row of the matrix: the index of a tensor, or the last segment for padding."""
        numbers = [self.segments - 1] * (self.length // self.width)
        for i, (size, offset) in enumerate(zip(self.sizes, self.offsets, strict=True)):
            first, count = offset // self.width, -(-size // self.width)
            numbers[first : first + count] = [i] * count
        return numbers

    def row_sizes(self) -> list[int]:
        """Return the number of elements in each row of the matrix that belong to a tensor."""
        sizes = [0] * (self.length // self.width)
        for size, offset in zip(self.sizes, self.offsets, strict=True):
            first, (full, rest) = offset // self.width, divmod(size, self.width)
            sizes[first : first + full] = [self.width] * full
            if rest:
                sizes[first + full] = rest
        return sizes


def _place(sizes: Sequence[int], alignment: int) -> tuple[tuple[int, ...], int]:
    """Return the offsets of tensors, and the end of the last one, as multiples of ``alignment``."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // alignment) * alignment
    return tuple(offsets), end


def _rounded(rows: int) -> int:
    """Return a number of rows rounded up, by at most one sixteenth."""
    step = 1 << max(rows.bit_length() - 5, 0)
    return -(-rows // step) * step


def fits(param: Tensor, rows: int) -> bool:
    """Return True if a parameter can be moved into a flat buffer.

    Not if it shares its storage with other tensors, which would no longer see its values.
    """
    if type(param) not in PLAIN_TYPES or param.is_complex() or not param.numel() or param.is_inference():
        return False
    storage = param.untyped_storage()
    # a device may keep its memory outside the storage, which then has no bytes
    is_whole = storage.nbytes() in (0, param.numel() * param.element_size())
    return (is_whole or is_flat(param)) and layout.has_working_view(param, rows)


def is_flat(tensor: Tensor) -> bool:
    """Return True if a tensor is a part of a flat buffer of this package."""
    return type(tensor) in PLAIN_TYPES and has_memory(tensor) and mark_of(tensor) is not None


def mark_of(tensor: Tensor) -> object:
    """Return the object that marks the storage of a flat buffer, or None."""
    return getattr(tensor.untyped_storage(), MARK, None)
