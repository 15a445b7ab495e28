"""The checks of hyperparameters that torch.optim's optimizers share, with torch's wording. NaN fails them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

Number = float | Tensor


def check_lr(lr: Number) -> None:
    """A learning rate is a number, or a tensor of one element, that is not negative."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    check_not_negative("learning rate", lr)


def check_not_negative(name: str, value: Number) -> None:
    """Zero or more."""
    if not value >= 0.0:
        raise ValueError(f"Invalid {name}: {value}")


def check_betas(betas: Sequence[Number]) -> None:
    """Decay rates lie in [0, 1) and are both numbers or both tensors."""
    if len(betas) != 2:
        raise ValueError(f"Invalid betas: {betas}; two values are needed")
    for i, beta in enumerate(betas):
        if isinstance(beta, Tensor) and beta.numel() != 1:
            raise ValueError(f"Tensor betas[{i}] must be 1-element")
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
    if len({isinstance(beta, Tensor) for beta in betas}) > 1:
        raise ValueError("betas must be either both floats or both Tensors")


def check_adam(group: dict[str, Any]) -> None:
    """The hyperparameters of Adam and its relatives."""
    check_lr(group["lr"])
    check_not_negative("epsilon value", group["eps"])
    check_betas(group["betas"])
    check_not_negative("weight_decay value", group["weight_decay"])
