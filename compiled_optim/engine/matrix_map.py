"""What a rule says about matrices: the function that maps them, and how a parameter is cut into them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class MatrixMap(ABC):
    """A function of matrices that treats each matrix by itself. Must be hashable: equal maps compute the same.

    It has to map the transpose of a matrix to the transpose of the result, because tall matrices are transposed.
    """

    dtype: torch.dtype
    """The dtype in which it computes."""

    @abstractmethod
    def __call__(self, stack: Tensor) -> Tensor:
        """Return the results for a stack of matrices, which are not taller than wide. The stack is not changed."""


class Part(NamedTuple):
    """Consecutive rows of each matrix of a parameter, and a factor of the result for them."""

    rows: int
    scale: float = 1.0


@dataclass(frozen=True)
class MatrixCut:
    """How a parameter is cut into matrices.

    The first ``batch_dims`` dimensions number the matrices. The next one has the rows, and all others the columns. The
    rows are split into ``parts``, each of which is a matrix of its own.
    """

    batch_dims: int
    parts: tuple[Part, ...]

    def views(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the parts of a tensor: first its batch dimensions, then rows, then those of the columns."""
        sizes = [part.rows for part in self.parts]
        return torch.split(tensor, sizes, self.batch_dims) if len(sizes) > 1 else [tensor]

    def sizes(self, shape: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return for each part the number of matrices, of their rows and of their columns."""
        count, columns = math.prod(shape[: self.batch_dims]), math.prod(shape[self.batch_dims + 1 :])
        return [(count, part.rows, columns) for part in self.parts]
