"""How parameters and states are stored, and how an update rule sees them.

A rule computes in float32 or float64. A storage converts between what is kept in memory and what the rule works on:
``load`` before the rule runs, ``store`` after it. A storage is part of a program, so it is compiled into the same pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_optim.tensors import Tensors


class Storage(ABC):
    """Converts a list of tensors, parameters or one state, between memory and the rule. Hashable."""

    @abstractmethod
    def load(self, kept: list[Tensor], dtype: torch.dtype) -> Tensors:
        """Return what the rule works on, in the dtype it computes in."""

    @abstractmethod
    def store(self, kept: list[Tensor], result: Tensors) -> None:
        """Write the rule's result back."""


@dataclass(frozen=True)
class Direct(Storage):
    """Tensors that are kept in the dtype the rule computes in: it works on them in place."""

    def load(self, kept: list[Tensor], dtype: torch.dtype) -> Tensors:
        """Return the tensors themselves."""
        return Tensors(kept)

    def store(self, kept: list[Tensor], result: Tensors) -> None:
        """Do nothing: the rule has written to memory."""


@dataclass(frozen=True)
class Rounded(Storage):
    """Tensors that are kept in another dtype: converted before the rule, rounded to nearest once after it."""

    def load(self, kept: list[Tensor], dtype: torch.dtype) -> Tensors:
        """Return converted copies."""
        return Tensors(tensor.to(dtype) for tensor in kept)

    def store(self, kept: list[Tensor], result: Tensors) -> None:
        """Round the result into memory."""
        torch._foreach_copy_(kept, result)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a rule works on parameters of ``dtype``: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def storage_for(kept: torch.dtype, computed: torch.dtype) -> Storage:
    """Return the storage of tensors that are kept in one dtype and computed on in another."""
    return Direct() if kept == computed else Rounded()
