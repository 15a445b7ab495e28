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


def check_betas(betas: Sequence[Number], count: int) -> None:
    """So many decay rates, which lie in [0, 1) and are all numbers or all tensors."""
    if len(betas) != count:
        raise ValueError(f"Invalid betas: {betas}; {count} values are needed")
    for i, beta in enumerate(betas):
        if isinstance(beta, Tensor) and beta.numel() != 1:
            raise ValueError(f"Tensor betas[{i}] must be 1-element")
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
    if len({isinstance(beta, Tensor) for beta in betas}) > 1:
        raise ValueError("betas must be either both floats or both Tensors")


def check_usual(group: dict[str, Any], betas: int = 2) -> None:
    """Whichever a group has of ``lr``, ``eps``, ``betas`` (so many of them) and ``weight_decay``."""
    if "lr" in group:
        check_lr(group["lr"])
    if "eps" in group:
        check_not_negative("epsilon value", group["eps"])
    if "betas" in group:
        check_betas(group["betas"], betas)
    if "weight_decay" in group:
        check_not_negative("weight_decay value", group["weight_decay"])
