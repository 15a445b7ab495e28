"""Numbers of one byte: block-scaled floating point.

A block of BLOCK consecutive elements has a scale, the largest absolute value in it. Each element is a byte: the
logarithm of its share of the scale, linear between powers of two, as in a floating-point number.

================  ====================  =================  =====================
code              bits                  range              largest relative step
================  ====================  =================  =====================
signed            sign, 4 exp., 3 man.  2^-15.9 to 1, 0    1/8
unsigned          4 exp., 4 man.        2^-15.9 to 1       1/16
================  ====================  =================  =====================

An unsigned element is never zero, unless its whole block is: a second moment of zero would make the step of its element
as large as possible. The steps are relative to the element and not to its block, so rounding errors do not grow for
elements that are small compared with their neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
"""Elements with a common scale. Scales in float32 add 4 / BLOCK bytes to each element."""

_ONE = 0x3F800000  # the bits of 1.0 in float32
_MANTISSA = 23
_SMALLEST_SCALE = 2.0**-126


def encode(share: Tensor, bits: Tensor | None, signed: bool) -> Tensor:
    """Return the codes of numbers in [-1, 1], or in [0, 1] for an unsigned code.

    ``bits`` are :func:`dropped_bits` random bits for each element. They round up with the right probability, so the
    expected value of a code is the number itself. None rounds to nearest.
    """
    dropped, largest = dropped_bits(signed), 127 if signed else 255
    plain = share.view(torch.int32)
    above = (plain & 0x7FFFFFFF if signed else plain) - (_ONE - (largest << dropped))
    rounded = above + (1 << (dropped - 1) if bits is None else bits)
    code = (rounded.clamp(min=0) >> dropped).clamp(max=largest)
    if signed:
        code = torch.where(code == 0, 0, code | ((plain >> 24) & 128))
    return code.to(torch.uint8)


def decode(code: Tensor, signed: bool) -> Tensor:
    """Return the numbers that codes stand for, in float32."""
    dropped, largest = dropped_bits(signed), 127 if signed else 255
    wide = code.to(torch.int32)
    if not signed:
        return ((wide << dropped) + (_ONE - (largest << dropped))).view(torch.float32)
    size = wide & largest
    number = ((size << dropped) + (_ONE - (largest << dropped))) | ((wide & 128) << 24)
    return torch.where(size == 0, 0.0, number.view(torch.float32))


def dropped_bits(signed: bool) -> int:
    """Return how many bits of the mantissa of a float32 a code does not keep."""
    return _MANTISSA - (3 if signed else 4)


def scales_of(values: Tensor, signed: bool) -> Tensor:
    """Return the scale of each block: of each row of a 2-D tensor, or of BLOCK elements of a 1-D tensor."""
    sizes = values.abs() if signed else values
    if values.ndim == 1:
        sizes = torch.nn.functional.pad(sizes, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    return sizes.amax(1)


def spread(scales: Tensor, values: Tensor) -> Tensor:
    """Return the scale of each element of ``values``, or something that broadcasts to it."""
    if values.ndim == 2:
        return scales.unsqueeze(1)
    return scales.repeat_interleave(BLOCK)[: values.numel()]


def share_of(values: Tensor, scales: Tensor) -> Tensor:
    """Return values divided by the scales of their blocks."""
    return values * spread(1.0 / scales.clamp(min=_SMALLEST_SCALE), values)


def blocks(elements: int) -> int:
    """Return the number of blocks, and of scales, of a 1-D tensor."""
    return -(-elements // BLOCK)
