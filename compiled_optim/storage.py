"""Formats in which parameters and states are kept in memory, and their conversion for an update rule.

A rule computes in float32 or float64. A storage converts between memory and rule: ``load`` runs before the rule,
``store`` after it. A storage is part of a program, so it is compiled into the same pass. Some storages keep companions:
further tensors, which are states of their own in ``optimizer.state``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compiled_optim.noise import Noise, bits_of
from compiled_optim.quantization import decode, dropped_bits, encode, scales_of
from compiled_optim.tensors import Tensors

Companions = Sequence[list[Tensor]]
"""Further lists that a storage keeps beside its own, such as the scales of quantised tensors."""


class Storage(ABC):
    """Converts a list of tensors (the parameters, or one state) between memory and the rule. Must be hashable."""

    companions: ClassVar[tuple[str, ...]] = ()
    """The names of the companions. A name that starts with an underscore is a suffix of the name of the state."""

    by_rows: ClassVar[bool] = False
    """Whether the companions have a number for each row of a 2-D tensor, or for each block of a 1-D tensor."""

    uses_noise: bool = False
    """Whether results are rounded at random."""

    @property
    def word(self) -> str:
        """A word for logs and ``explain()``; empty if tensors are kept as they are, or rounded to nearest."""
        return ""

    @abstractmethod
    def load(self, kept: list[Tensor], companions: Companions, dtype: torch.dtype) -> Tensors:
        """Return the tensors that the rule works on, in the dtype in which it computes."""

    @abstractmethod
    def store(
        self, kept: list[Tensor], companions: Companions, result: Tensors, noise: Noise | None, place: int
    ) -> None:
        """Write the rule's result back. ``place`` is the number of the list, for :meth:`Noise.bits`."""


@dataclass(frozen=True)
class Direct(Storage):
    """For tensors in the dtype in which the rule computes: the rule works on them in place."""

    def load(self, kept: list[Tensor], companions: Companions, dtype: torch.dtype) -> Tensors:
        """Return the tensors themselves."""
        return Tensors(kept)

    def store(
        self, kept: list[Tensor], companions: Companions, result: Tensors, noise: Noise | None, place: int
    ) -> None:
        """Do nothing: the rule has updated the tensors in place."""


@dataclass(frozen=True)
class Rounded(Storage):
    """For tensors in another dtype: convert before the rule, round once after it, to nearest or stochastically."""

    uses_noise: bool = False

    @property
    def word(self) -> str:
        """The kind of rounding."""
        return "stochastic" if self.uses_noise else ""

    def load(self, kept: list[Tensor], companions: Companions, dtype: torch.dtype) -> Tensors:
        """Return converted copies."""
        return Tensors(tensor.to(dtype) for tensor in kept)

    def store(
        self, kept: list[Tensor], companions: Companions, result: Tensors, noise: Noise | None, place: int
    ) -> None:
        """Round the result to the dtype in memory."""
        if self.uses_noise:
            assert noise is not None
            pairs = zip(result, noise.bits(place, 16), strict=True)
            result = Tensors(round_to(kept[0].dtype, value, _of_shape(value, bits)) for value, bits in pairs)
        torch._foreach_copy_(kept, result)


@dataclass(frozen=True)
class Compensated(Storage):
    """For parameters of low precision: a companion of the same dtype holds what rounding has lost (Kahan).

    The companion is rounded stochastically, so that updates which are small compared with it are not lost either. Where
    it is too large to be what rounding a parameter has lost, because somebody has written to the parameter, it is not
    used; nor where the parameter is not finite.
    """

    companions = ("compensation",)
    uses_noise = True
    word = "kahan"

    def load(self, kept: list[Tensor], companions: Companions, dtype: torch.dtype) -> Tensors:
        """Return the sums of both."""
        pairs = [(tensor.to(dtype), lost.to(dtype)) for tensor, lost in zip(kept, companions[0], strict=True)]
        # at most half a unit is lost, and it is rounded up to a whole one if that is the smallest number
        return Tensors(
            torch.where(lost.abs() <= _unit(kept[0].dtype, value), value + lost, value) for value, lost in pairs
        )

    def store(
        self, kept: list[Tensor], companions: Companions, result: Tensors, noise: Noise | None, place: int
    ) -> None:
        """Round the result to nearest; keep the difference."""
        rounded = [round_to(kept[0].dtype, value) for value in result]
        lost = Tensors(value - near for value, near in zip(result, rounded, strict=True))
        Rounded(noise is not None).store(companions[0], (), lost, noise, place)
        torch._foreach_copy_(kept, rounded)


@dataclass(frozen=True)
class MasterWeights(Storage):
    """For parameters of low precision: a companion in float32 is updated, and parameters are its rounded values.

    Where a parameter is no longer the rounded value, because somebody has written to it, it is used itself.
    """

    companions = ("master",)
    word = "master weights"

    def load(self, kept: list[Tensor], companions: Companions, dtype: torch.dtype) -> Tensors:
        """Return the master weights."""
        rounded = [round_to(kept[0].dtype, master) for master in companions[0]]
        triples = zip(rounded, companions[0], (tensor.to(dtype) for tensor in kept), strict=True)
        return Tensors(torch.where(near == written, master, written) for near, master, written in triples)

    def store(
        self, kept: list[Tensor], companions: Companions, result: Tensors, noise: Noise | None, place: int
    ) -> None:
        """Keep the result, and round it to nearest."""
        torch._foreach_copy_(companions[0], result)
        torch._foreach_copy_(kept, result)


@dataclass(frozen=True)
class Quantized(Storage):
    """For states in one byte: codes, and a scale for each block; see ``quantization``."""

    signed: bool

    companions = ("_scale",)
    by_rows = True
    uses_noise = True
    word = "8-bit"

    def load(self, kept: list[Tensor], companions: Companions, dtype: torch.dtype) -> Tensors:
        """Return the numbers that the codes stand for."""
        pairs = zip(kept, companions[0], strict=True)
        return Tensors(decode(codes, scales, self.signed).to(dtype) for codes, scales in pairs)

    def store(
        self, kept: list[Tensor], companions: Companions, result: Tensors, noise: Noise | None, place: int
    ) -> None:
        """Compute the scales, and round to codes stochastically."""
        bits: Sequence[Tensor | None] = [None] * len(kept)
        if noise is not None:
            bits = noise.bits(place, dropped_bits(self.signed))
        values = [value.to(torch.float32) for value in result]
        scales = [scales_of(value, self.signed) for value in values]
        for codes, value, own, random in zip(kept, values, scales, bits, strict=True):
            codes.copy_(encode(value, own, random, self.signed))
        torch._foreach_copy_(companions[0], scales)


def _of_shape(value: Tensor, bits: Tensor) -> Tensor:
    """Return random bits for a state, which may have the size 1 where its parameter has another."""
    for dim, size in enumerate(value.shape):
        if isinstance(size, int) and size == 1:
            bits = bits.narrow(dim, 0, 1)
    return bits


def round_to(dtype: torch.dtype, value: Tensor, bits: Tensor | None = None) -> Tensor:
    """Return numbers in float32 that ``dtype`` (bfloat16 or float16) holds: the nearest, or those that ``bits`` choose.

    ``bits`` are 16 random bits for each element. They round up or down without bias. The numbers are computed, because
    Inductor removes a conversion to ``dtype`` and back. torchair keeps it, and cannot convert integer operations.
    Results of arithmetic that are NaN or infinite stay so.
    """
    if bits is None and value.device.type == "npu":
        return value.to(dtype).to(torch.float32)
    if dtype == torch.bfloat16:
        plain = bits_of(value)
        added = 0x7FFF + ((plain >> 16) & 1) if bits is None else bits  # to nearest: ties to even
        total = plain + added
        # the sum overflows for some NaN, such as 0x7FFFFFFF, which CUDA makes: then set all bits, which are a NaN too
        return ((total | ((total ^ plain) >> 31)) & ~0xFFFF).view(torch.float32)
    unit = _unit(dtype, value)
    share = value.to(torch.float32) / unit
    return (share.round() if bits is None else torch.floor(share + bits.to(torch.float32) * 2.0**-16)) * unit


def _unit(dtype: torch.dtype, value: Tensor) -> Tensor:
    """Return the distance between the numbers of ``dtype`` (bfloat16 or float16) around those in float32."""
    info = torch.finfo(dtype)
    largest = 2.0 ** (math.frexp(info.max)[1] - 1)  # the largest power of two
    power = (bits_of(value) & 0x7F800000).view(torch.float32)
    return (power * info.eps).clamp(min=info.smallest_normal * info.eps, max=largest * info.eps)


LOW_PRECISION = (torch.bfloat16, torch.float16)
"""Dtypes that are rounded stochastically on request."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a rule computes for parameters of ``dtype``: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def storage_for(kept: torch.dtype, computed: torch.dtype, stochastic: bool = False) -> Storage:
    """Return the storage for tensors that are kept in one dtype and computed in another."""
    return Direct() if kept == computed else Rounded(stochastic and kept in LOW_PRECISION)
