"""The few list operations that several update rules share and ``torch._foreach_*`` has no single name for.

Scalars arrive as 0-dim tensors. They are spelled so that they stay tensors: ``_foreach_add_(xs, tensor)`` and
``_foreach_addcmul_(..., value=tensor)`` would read the value back to the host, in eager and in the compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TensorList = list[Tensor] | tuple[Tensor, ...]

Sums = list[Tensor]
"""A sum over each of several tensors, as 0-dim tensors."""

Total = Callable[..., tuple[Sums, ...]]
"""Takes several :data:`Sums` over the shards that are here and returns the sums over all shards, wherever they are."""


def blend_(averages: TensorList, decay: Tensor, values: TensorList, gain: Tensor) -> None:
    """``averages = decay * averages + gain * values``, in place."""
    torch._foreach_mul_(averages, decay)
    torch._foreach_add_(averages, torch._foreach_mul(values, gain))


def approach_(averages: TensorList, values: TensorList, gain: Tensor) -> None:
    """``averages += gain * (values - averages)``, in place: as :func:`blend_`, and exact where both are equal."""
    torch._foreach_add_(averages, torch._foreach_mul(torch._foreach_sub(values, averages), gain))


def shifted(tensors: TensorList, offset: Tensor) -> TensorList:
    """``tensors + offset``."""
    return torch._foreach_add(tensors, [offset] * len(tensors))


def plus_scaled(tensors: TensorList, others: TensorList, scale: Tensor) -> TensorList:
    """``tensors + scale * others``."""
    return torch._foreach_add(tensors, torch._foreach_mul(others, scale))


def minus_scaled_(tensors: TensorList, others: TensorList, scale: Tensor) -> None:
    """``tensors -= scale * others``, in place."""
    torch._foreach_sub_(tensors, torch._foreach_mul(others, scale))


def moment_scalars(*betas: float) -> dict[str, float]:
    """``beta1``, ``gain1``, ``beta2`` ...: decay rates, and one minus each, as :func:`moments_` takes them."""
    pairs = [((f"beta{i}", beta), (f"gain{i}", 1 - beta)) for i, beta in enumerate(betas, 1)]
    return dict(item for pair in pairs for item in pair)


def moments_(
    exp_avg: TensorList,
    exp_avg_sq: TensorList,
    grads: TensorList,
    beta1: Tensor,
    gain1: Tensor,
    beta2: Tensor,
    gain2: Tensor,
) -> None:
    """Adam's running averages of the gradient and its square, in place; each gain is one minus its beta."""
    blend_(exp_avg, beta1, grads, gain1)  # m = b1 m + (1 - b1) g
    blend_(exp_avg_sq, beta2, torch._foreach_mul(grads, grads), gain2)  # v = b2 v + (1 - b2) g²


def squares(tensors: TensorList) -> Sums:
    """The sum of the squares of each tensor as a 0-dim tensor."""
    return [(tensor * tensor).sum(dtype=sum_dtype(tensor)) for tensor in tensors]


def sum_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype to sum a tensor in: float64 on the CPU, where Inductor sums in order and float32 would lose digits.

    Accelerators sum in trees, which loses next to nothing, and compute in float64 slowly or not at all.
    """
    return torch.float64 if tensor.device.type == "cpu" else tensor.dtype


def settled(tensor: Tensor) -> Tensor:
    """The tensor itself, computed once: Inductor would compute a small result anew for every element that uses it.

    To eager torch this is a view of the whole; in Inductor a view by strides exists only of memory, so it is stored.
    """
    return tensor.as_strided(tensor.shape, tensor.stride())
