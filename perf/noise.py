"""Parameters and gradients for the races: windows into one array of normal noise.

A new window gives every element a new value, equal for all contenders and without the price of new random numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from perf.workloads import Shapes, elements

MARGIN = 1 << 16


class Noise:
    """Windows of a workload's shapes."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> None:
        self.shapes = shapes
        self.sizes = [math.prod(shape) for shape in shapes]
        generator = torch.Generator().manual_seed(0)
        self.pool = torch.randn(elements(shapes) + MARGIN, generator=generator).to(device, dtype)

    def window(self, index: int) -> list[Tensor]:
        """The tensors of one window; those of nearby indices share no value at any place."""
        return self.cut(self._flat(index))

    def start(self) -> Tensor:
        """The values that parameters begin with, in one piece, of the size that initialisation gives to weights."""
        return self._flat(0) * 0.02

    def parameters(self, dtype: torch.dtype) -> list[Tensor]:
        """Fresh parameters in memory of their own."""
        return [torch.nn.Parameter(value.to(dtype, copy=True)) for value in self.cut(self.start())]

    def _flat(self, index: int) -> Tensor:
        begin = index * 4099 % MARGIN
        return self.pool[begin : begin + sum(self.sizes)]

    def cut(self, flat: Tensor) -> list[Tensor]:
        """One flat tensor as views of the workload's shapes."""
        parts = torch.split(flat, self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
