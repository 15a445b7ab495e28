"""Cautious updates: drop the elements of an update that point along the gradient instead of against it.

The update of any rule is known from the parameters before and after it. Decoupled weight decay is no part of the
update: what a rule multiplies the parameters by (``p *= 1 - lr * weight_decay``) is applied to the parameters before
the update too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_optim.flat_tensors import FlatTensors
from compiled_optim.tensors import AllReduce, Tensors, materialize

SMALLEST_SHARE = 1e-3
"""What remains of an update is divided by the share of its elements, but by no less than this."""


class Followed(Tensors):
    """Parameters, and in ``start`` their values before the update, with the weight decay of the update."""

    start: Tensors

    def __imul__(self, other: Any) -> Tensors:  # type: ignore[override]
        self.start *= other
        return super().__imul__(other)

    def __itruediv__(self, other: Any) -> Tensors:
        self.start /= other
        return super().__itruediv__(other)


class FollowedFlat(Followed, FlatTensors):
    """Parameters in a flat buffer."""


def follow(params: Tensors) -> Followed:
    """Return the same parameters in a list that remembers where they start."""
    if isinstance(params, FlatTensors):
        made: Followed = FollowedFlat(params, params.segments, params.level)
    else:
        made = Followed(params)
    made.start = params._like(tensor.clone() for tensor in params)
    return made


def mask_update(params: Followed, grads: Tensors, all_reduce: AllReduce) -> None:
    """Undo the elements of an update whose sign is not that of descent, and scale the others up in turn."""
    change = params - params.start
    mask = (change * grads < 0.0).map(lambda agrees: agrees.to(grads[0].dtype))
    ones = grads.map(torch.ones_like)
    kept, elements = all_reduce(mask.sum_of_squares(), ones.sum_of_squares())

    def factor(kept: Tensor, elements: Tensor) -> Tensor:
        share = (kept / elements).clamp(min=SMALLEST_SHARE)
        return materialize((1.0 / share).to(grads[0].dtype))

    params.copy_(params.start + change * mask * kept.map(factor, elements))
