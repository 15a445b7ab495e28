"""Random bits for stochastic rounding, computed from the values of a step.

The bits of an element are a hash of its gradient, of its parameter before the step and of a number that changes in
every step. They need no memory and no generator, and they are the same in every run, in eager and compiled code, for
any number of threads or shards. Elements that are equal in all these values are rounded alike, as they stay equal in
full precision too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.tensors import Number

# odd numbers, as 32-bit integers, from published integer hashes (Knuth's multiplicative hash, murmur3, lowbias32)
_OF_GRAD = -1640531535
_MULTIPLIERS = (-1028477387, 2146121005, -2073254261, 668265263)

SEED_BITS = 24
"""The number of bits of a seed. A float32 holds such a number exactly."""


def step_seed(seed: int, step: int) -> int:
    """Return the number for one step, of SEED_BITS bits. It looks random in both arguments (splitmix64)."""
    mask = (1 << 64) - 1
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) & mask
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        mixed = (mixed ^ (mixed >> shift)) * multiplier & mask
    return (mixed ^ (mixed >> 31)) >> (64 - SEED_BITS)


class Noise:
    """Random bits for each element of parallel lists of tensors."""

    def __init__(self, grads: Sequence[Tensor], params: Sequence[Tensor], seed: Number | Tensor) -> None:
        """Take the gradients and parameters as they are in memory before the step."""
        value: Any = getattr(seed, "tensor", seed)
        number = value.to(torch.int32) if isinstance(value, Tensor) else int(value)
        self._hashes = [_hash(grad, param, number) for grad, param in zip(grads, params, strict=True)]

    def bits(self, place: int, count: int) -> list[Tensor]:
        """Return random bits for each element, as non-negative int32 tensors; others for each ``place``.

        The numbers have ``count`` bits, of which the highest 16 are random and the others are 0.
        """
        word, is_low = divmod(place, 2)
        mask = 0xFFFF << (count - 16)
        words = [value * _MULTIPLIERS[word % len(_MULTIPLIERS)] for value in self._hashes]
        if not is_low:
            return [(value >> (32 - count)) & mask for value in words]
        # the low bits of a product depend on few bits of its factors, so high bits are added
        return [((value ^ (value >> 15)) << (count - 16)) & mask for value in words]


def bits_of(tensor: Tensor) -> Tensor:
    """Return the bits of float32 numbers as int32."""
    return tensor.to(torch.float32).view(torch.int32)


def _hash(grad: Tensor, param: Tensor, seed: Tensor | int) -> Tensor:
    mixed = bits_of(grad) * _OF_GRAD + bits_of(param) + seed
    return mixed ^ (mixed >> 16)
