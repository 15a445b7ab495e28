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
        start = index * 4099 % MARGIN
        parts = torch.split(self.pool[start : start + sum(self.sizes)], self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def parameters(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Fresh parameters, of the size that initialisation gives to weights."""
        return [torch.nn.Parameter((value * 0.02).to(dtype or value.dtype)) for value in self.window(0)]
