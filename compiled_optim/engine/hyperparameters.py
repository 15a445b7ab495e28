"""Range checks of hyperparameters, with the messages of torch.optim. All of them reject NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

FloatOrTensor = float | Tensor


def check_lr(lr: FloatOrTensor) -> None:
    """Raise ValueError if a learning rate is negative, or a tensor with more than one element."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    check_not_negative("learning rate", lr)


def check_not_negative(name: str, value: FloatOrTensor) -> None:
    """Raise ValueError if a value is negative."""
    if not value >= 0.0:
        raise ValueError(f"Invalid {name}: {value}")


def check_betas(betas: Sequence[FloatOrTensor], count: int) -> None:
    """Raise ValueError unless there are ``count`` decay rates in [0, 1), all of them numbers or all tensors."""
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
    """Check ``lr``, ``eps``, ``betas`` and ``weight_decay`` where the group has them.

    The argument ``betas`` is the expected number of decay rates.
    """
    if "lr" in group:
        check_lr(group["lr"])
    if "eps" in group:
        check_not_negative("epsilon value", group["eps"])
    if "betas" in group:
        check_betas(group["betas"], betas)
    if "weight_decay" in group:
        check_not_negative("weight_decay value", group["weight_decay"])
