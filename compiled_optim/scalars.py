"""Hyperparameters as one small tensor that is refilled before every step, so that no value is ever compiled in."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch


class Scalars:
    """A 1-D CPU tensor over host memory that :meth:`fill` rewrites without a call into torch.

    The values are computed on the host in double precision and rounded here, once.
    """

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self._typecode = "d" if dtype == torch.float64 else "f"
        self._memory = array(self._typecode, [0.0] * count)
        self.tensor = torch.frombuffer(self._memory, dtype=dtype)

    def fill(self, values: Iterable[float]) -> None:
        """Write this step's values."""
        self._memory[:] = array(self._typecode, values)
