"""Numbers of one byte: block-scaled floating point.

A block of BLOCK consecutive elements has a scale, and each element is a byte: the logarithm of its share of the largest
absolute value in the block, linear between powers of two, as in a floating-point number.

================  ====================  =================  =====================
code              bits                  range              largest relative step
================  ====================  =================  =====================
signed            sign, 4 exp., 3 man.  2^-18 to 1, 0      1/8
unsigned          4 exp., 4 man.        2^-15 to 1         1/16
================  ====================  =================  =====================

An unsigned element is never zero, unless its whole block is: a second moment of zero would make the step of its element
as large as possible. The steps are relative to the element and not to its block, so rounding errors do not grow for
elements that are small compared with their neighbours. Only below 2^-15 the steps of the signed code are equal.

A byte is a part of the bits of a float32. The numbers of a code are chosen so that this part starts at a byte's first
bit and the other bits are constant, which saves operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
"""Elements with a common scale. Scales in float32 add 4 / BLOCK bytes to each element."""

_TINY = 2.0**-126  # the smallest normal number of float32
_SIGN = -(1 << 31)  # the bit of the sign of a float32


@dataclass(frozen=True)
class _Code:
    """A code of one byte.

    Attributes:
        mantissa: the number of bits of the mantissa.
        smallest: the number whose bits are ``constant``.
        constant: the bits that all numbers have in common, as an int32.
        largest: the number that stands for the largest value of a block.
    """

    mantissa: int
    smallest: float
    constant: int
    largest: float

    @property
    def dropped(self) -> int:
        """The number of bits of the mantissa of a float32 that a code does not keep."""
        return 23 - self.mantissa


# the exponents of the signed code are from 2^-31 to 2^-16, so that the bit before them is 0; they are decreased by the
# smallest number, so that there is a zero
_SIGNED = _Code(3, 2.0**-31, (127 - 31) << 23, 2.0**-16 - 2.0**-31)
_UNSIGNED = _Code(4, 2.0**-15, (127 - 15) << 23, 1.0)


def encode(values: Tensor, scales: Tensor, bits: Tensor | None, signed: bool) -> Tensor:
    """Return the codes of values, with the scales of their blocks.

    ``bits`` are :func:`dropped_bits` random bits for each element. They round up with the right probability, so the
    expected value of a code is the number itself. None rounds to nearest.
    """
    code = _code(signed)
    number = values * spread(1.0 / (scales + _TINY), values)  # which changes no scale but zero
    added: Tensor | int = 1 << (code.dropped - 1) if bits is None else bits
    # the conversion to a byte keeps the lowest 8 bits
    if not signed:
        return ((number.view(torch.int32).clamp(min=code.constant) + added) >> code.dropped).to(torch.uint8)
    size = ((number.abs() + code.smallest).view(torch.int32) + added) >> code.dropped
    return (size | ((number.view(torch.int32) >> 24) & 128)).to(torch.uint8)


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Return the values that codes stand for with the scales of their blocks, in float32."""
    code = _code(signed)
    wide = codes.to(torch.int32)
    if not signed:
        number = ((wide << code.dropped) | code.constant).view(torch.float32)
    else:
        size = ((wide << code.dropped) & (127 << code.dropped)) | code.constant
        size = (size.view(torch.float32) - code.smallest).view(torch.int32)
        number = (size | ((wide << 24) & _SIGN)).view(torch.float32)
    return number * spread(scales, codes)


def dropped_bits(signed: bool) -> int:
    """Return how many bits of the mantissa of a float32 a code does not keep."""
    return _code(signed).dropped


def scales_of(values: Tensor, signed: bool) -> Tensor:
    """Return the scale of each block: of each row of a 2-D tensor, or of BLOCK elements of a 1-D tensor.

    The bits of numbers that are not negative have the order of the numbers, and NaN is the largest. Compared as
    integers, they need no operations for NaN.
    """
    bits = values.abs().view(torch.int32)
    if values.ndim == 1:
        bits = torch.nn.functional.pad(bits, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    return bits.amax(1).view(torch.float32) / _code(signed).largest


def spread(scales: Tensor, values: Tensor) -> Tensor:
    """Return the scale of each element of ``values``, or something that broadcasts to it."""
    if values.ndim == 2:
        return scales.unsqueeze(1)
    return scales.repeat_interleave(BLOCK)[: values.numel()]


def _code(signed: bool) -> _Code:
    return _SIGNED if signed else _UNSIGNED


def blocks(elements: int) -> int:
    """Return the number of blocks, and of scales, of a 1-D tensor."""
    return -(-elements // BLOCK)
