"""Cautious updates: drop the elements of an update that point along the gradient instead of against it.

The update of any rule is what it subtracts from the parameters, ``p -= u``. Other changes are no update and are not
masked: a factor, such as that of decoupled weight decay (``p *= 1 - lr * weight_decay``), and an interpolation towards
other weights (``p.lerp_(z, share)``).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import gt, lt
from typing import Any

import torch
from torch import Tensor

from compiled_optim.errors import RuleError
from compiled_optim.flat_tensors import FlatTensors
from compiled_optim.locations import definition
from compiled_optim.tensors import AllReduce, Number, Tensors, materialize

SMALLEST_SHARE = 1e-3
"""What remains of an update is divided by the share of its elements, but by no less than this."""


class Caution:
    """The mask of a step. The update of the parameters determines it; states that hold weights get the same mask."""

    def __init__(self, grads: Tensors, all_reduce: AllReduce) -> None:
        self._grads, self._all_reduce = grads, all_reduce
        self._factors: Tensors | None = None

    def masked(self, weights: Tensors) -> MaskedTensors:
        """Return the same tensors in a list that masks updates. The parameters have to be updated first."""
        if isinstance(weights, FlatTensors):
            made: MaskedTensors = MaskedFlatTensors(weights, weights.segments, weights.level)
        else:
            made = MaskedTensors(weights)
        made.caution, made.updates, made.has_rows = self, 0, weights.has_rows
        return made

    def of(self, update: Tensors, sign: Callable[[Tensors, float], Tensors]) -> Tensors:
        """Return an update without some elements, and the others scaled up in turn.

        ``sign`` compares the product of an element and its gradient with 0, and is true for elements that stay.
        """
        if self._factors is None:
            mask = sign(update * self._grads, 0.0).map(lambda agrees: agrees.to(self._grads[0].dtype))
            ones = self._grads.map(torch.ones_like)
            kept, elements = self._all_reduce(self._count(mask), self._count(ones))
            self._factors = mask * kept.map(self._scale, elements)
        return update * self._factors

    def _count(self, flags: Tensors) -> Tensors:
        """Return the number of ones in each tensor, added up by rows if the rule works by rows, as its own sums are.

        Sums over flat buffers go by rows already, and leave out padding.
        """
        by_rows = self._grads.has_rows and flags[0].ndim == 2 and not isinstance(flags, FlatTensors)
        return flags.row_sums(flags).total() if by_rows else flags.sum_of_squares()

    def _scale(self, kept: Tensor, elements: Tensor) -> Tensor:
        """Return the factor of the elements that stay, from their number and that of all elements."""
        share = (kept / elements).clamp(min=SMALLEST_SHARE)
        return materialize((1.0 / share).to(self._grads[0].dtype))


def check_updates(params: MaskedTensors, update: Callable[..., None]) -> None:
    """Raise RuleError if a rule has not updated the parameters once, so that there is no mask, or several."""
    if params.updates != 1:
        raise RuleError(
            f"{update.__qualname__} cannot be cautious: it updates the parameters {params.updates} times by `p -= u` "
            "or `p += u`, and not once",
            definition(update),
            "add up all terms of the update, and subtract them once from the whole list: p -= lr * u",
        )


class MaskedTensors(Tensors):
    """Parameters, or weights in a state, whose updates are masked."""

    caution: Caution
    updates: int
    has_rows = False

    def __isub__(self, other: Any) -> Tensors:
        self.updates += 1
        return super().__isub__(self.caution.of(self._as_list(other), gt))

    def __iadd__(self, other: Any) -> Tensors:  # type: ignore[override]
        self.updates += 1
        return super().__iadd__(self.caution.of(self._as_list(other), lt))

    def add_(self, values: Tensors, alpha: Number | Tensor) -> Tensors:
        """Add a scaled update."""
        return self.__iadd__(alpha * values)

    def copy_(self, other: list[Tensor]) -> Tensors:
        """Replace the weights by updated ones."""
        return self.__iadd__(self._like(other) - self)

    def ema_(self, values: Tensors, decay: Number) -> Tensors:
        """Interpolate, which is no update."""
        self.__imul__(decay)
        return super().__iadd__((1 - decay) * values)

    def lerp_(self, values: Tensors, weight: Number | Tensor) -> Tensors:
        """Interpolate, which is no update."""
        return super().__iadd__((values - self) * weight)

    def _as_list(self, other: Any) -> Tensors:
        """Return an operand as a list with a value for each element."""
        return other if isinstance(other, Tensors) else self.map(torch.zeros_like) + other


class MaskedFlatTensors(MaskedTensors, FlatTensors):
    """Weights in a flat buffer."""
