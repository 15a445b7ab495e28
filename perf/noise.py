"""Parameters and gradients for the races: slices of one array of normal noise, called windows.

Each window gives every element a new value, the same for all contenders, without the cost of new random numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from perf.workloads import Shapes, elements

MARGIN = 1 << 16


class Noise:
    """Normal noise, cut into tensors of a workload's shapes."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> None:
        self.shapes = shapes
        self.sizes = [math.prod(shape) for shape in shapes]
        generator = torch.Generator().manual_seed(0)
        self.pool = torch.randn(elements(shapes) + MARGIN, generator=generator).to(device, dtype)

    def window(self, index: int) -> list[Tensor]:
        """Return the tensors of one window. Windows of nearby indices differ in every element."""
        return self.cut(self._flat(index))

    def start(self) -> Tensor:
        """Return the initial values of all parameters as one flat tensor, with the standard deviation 0.02."""
        return self._flat(0) * 0.02

    def parameters(self, dtype: torch.dtype) -> list[Tensor]:
        """Return new parameters with the initial values, in newly allocated memory."""
        return [torch.nn.Parameter(value.to(dtype, copy=True)) for value in self.cut(self.start())]

    def _flat(self, index: int) -> Tensor:
        begin = index * 4099 % MARGIN
        return self.pool[begin : begin + sum(self.sizes)]

    def cut(self, flat: Tensor) -> list[Tensor]:
        """Return views of a flat tensor with the workload's shapes."""
        parts = torch.split(flat, self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
