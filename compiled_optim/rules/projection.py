"""The projection of AdamP and SGDP: remove from a step its part along weights that are scale-invariant."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import invert, or_
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_optim.tensors import AllReduce, Number, Tensors, materialize


def projection(
    p: Tensors, g: Tensors, u: Tensors, all_reduce: AllReduce,
    *, delta: Number, eps: Number, decay: Number, wd_ratio: Number,
) -> tuple[Tensors, Tensors]:  # fmt: skip
    """Return how much of the weights is in the step ``u``, for each row, and the factor of the weight decay.

    The first is zero for tensors whose gradient is not nearly orthogonal to the weights. The second is ``1 - decay``
    there, else ``1 - decay * wd_ratio``.
    """
    channel = RowSums.of_rows(p, g, u)
    misses = channel.is_orthogonal(delta, eps).map(invert).total(channel.inner[0].dtype)
    *sums, size, missed = all_reduce(*channel.layer_sums(), misses)
    layer = RowSums._make([*sums, size.map(torch.sqrt)])
    # the channel view is tried first, and fires if all its rows are orthogonal; then the layer view
    channel_fires, layer_fires = missed.map(is_zero), layer.is_orthogonal(delta, eps)
    along = channel_fires.map(torch.where, channel.along(eps), layer_fires.map(or_zero, layer.along(eps)))
    along = along.map(partial(stored_as, p[0].dtype)).as_columns()
    fires = channel_fires.map(or_, layer_fires).map(materialize)
    return along, fires.map(partial(shrink_by, decay, wd_ratio, p[0].dtype), missed)


class RowSums(NamedTuple):
    """Sums over the rows of tensors, of g p, p², g² and u p, and the root of a row's length."""

    inner: Tensors
    weight: Tensors
    grad: Tensors
    overlap: Tensors
    root_length: Sequence[float | Tensor]

    @classmethod
    def of_rows(cls, p: Tensors, g: Tensors, u: Tensors) -> RowSums:
        """Return the sums of the channel view: as many rows as the tensors have."""
        inner, weight, grad, overlap = (a.row_sums(b) for a, b in ((g, p), (p, p), (g, g), (u, p)))
        return cls(inner, weight, grad, overlap, [length**0.5 for length in p.row_lengths()])

    def layer_sums(self) -> list[Tensors]:
        """Return the sums of the layer view, which is all rows as one, and the number of its elements."""
        sums = [rows.total() for rows in (self.inner, self.weight, self.grad, self.overlap)]
        return [*sums, self.inner.map(torch.ones_like).total().map(lambda rows, root: rows * root**2, self.root_length)]

    def is_orthogonal(self, delta: Number, eps: Number) -> Tensors:
        """Return for each row whether its gradient is nearly orthogonal to its weights."""

        def is_small(inner: Tensor, weight: Tensor, grad: Tensor, root_length: Tensor) -> Tensor:
            cosine = inner.abs() / (grad.sqrt() + eps) / (weight.sqrt() + eps)
            return cosine * root_length < delta  # cos < delta / sqrt(columns)

        return self.inner.map(is_small, self.weight, self.grad, self.root_length)

    def along(self, eps: Number) -> Tensors:
        """Return for each row how much of its weights is in its step: ``p̂ Σ(p̂ u) = p along``."""

        def share(overlap: Tensor, weight: Tensor) -> Tensor:
            norm = weight.sqrt() + eps
            return overlap / norm / norm

        return self.overlap.map(share, self.weight)


def is_zero(tensor: Tensor) -> Tensor:
    return tensor == 0


def or_zero(condition: Tensor, value: Tensor) -> Tensor:
    return torch.where(condition, value, 0.0)


def stored_as(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return materialize(tensor.to(dtype))


def shrink_by(decay: Number, wd_ratio: Number, dtype: torch.dtype, fires: Tensor, missed: Tensor) -> Tensor:
    """Return the factor of weight decay, which is smaller where the projection fires."""
    ratio = torch.where(fires, wd_ratio, torch.ones_like(missed).to(dtype))  # type: ignore[arg-type]
    return 1 - decay * ratio


def without(u: Tensor, weight: Tensor, along: Tensor) -> Tensor:
    """Return a step without its part along the weights."""
    return u - weight * along
