"""Formats in which parameters and states are kept in memory, and their conversion for an update rule.

A rule computes in float32 or float64. A storage converts between memory and rule: ``load`` runs before the rule,
``store`` after it. A storage is part of a program, so it is compiled into the same pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_optim.tensors import Tensors


class Storage(ABC):
    """Converts a list of tensors (the parameters, or one state) between memory and the rule. Must be hashable."""

    @abstractmethod
    def load(self, kept: list[Tensor], dtype: torch.dtype) -> Tensors:
        """Return the tensors that the rule works on, in the dtype in which it computes."""

    @abstractmethod
    def store(self, kept: list[Tensor], result: Tensors) -> None:
        """Write the rule's result back."""


@dataclass(frozen=True)
class Direct(Storage):
    """For tensors in the dtype in which the rule computes: the rule works on them in place."""

    def load(self, kept: list[Tensor], dtype: torch.dtype) -> Tensors:
        """Return the tensors themselves."""
        return Tensors(kept)

    def store(self, kept: list[Tensor], result: Tensors) -> None:
        """Do nothing: the rule has updated the tensors in place."""


@dataclass(frozen=True)
class Rounded(Storage):
    """For tensors in another dtype: convert before the rule, round to nearest once after it."""

    def load(self, kept: list[Tensor], dtype: torch.dtype) -> Tensors:
        """Return converted copies."""
        return Tensors(tensor.to(dtype) for tensor in kept)

    def store(self, kept: list[Tensor], result: Tensors) -> None:
        """Round the result to the dtype in memory."""
        torch._foreach_copy_(kept, result)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a rule computes for parameters of ``dtype``: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def storage_for(kept: torch.dtype, computed: torch.dtype) -> Storage:
    """Return the storage for tensors that are kept in one dtype and computed in another."""
    return Direct() if kept == computed else Rounded()
