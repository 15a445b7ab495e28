"""The few list operations that several update rules share and ``torch._foreach_*`` has no single name for.

Scalars arrive as 0-dim tensors. They are spelled so that they stay tensors: ``_foreach_add_(xs, tensor)`` and
``_foreach_addcmul_(..., value=tensor)`` would read the value back to the host, in eager and in the compiled graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

TensorList = list[Tensor] | tuple[Tensor, ...]


def blend_(averages: TensorList, decay: Tensor, values: TensorList, gain: Tensor) -> None:
    """``averages = decay * averages + gain * values``, in place."""
    torch._foreach_mul_(averages, decay)
    torch._foreach_add_(averages, torch._foreach_mul(values, gain))


def shift_(tensors: TensorList, offset: Tensor) -> None:
    """``tensors += offset``, in place."""
    torch._foreach_add_(tensors, [offset] * len(tensors))
