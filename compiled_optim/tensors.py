"""Lists of tensors with operators, so that an update rule reads like the equations of its paper.

Each operator of :class:`Tensors` is one ``torch._foreach_*`` call, so eager mode, a debugger and a compiler all see
plain PyTorch. Hyperparameters are Python numbers in eager mode and :class:`Scalar` objects while a rule is traced.
Plain ``torch._foreach_*`` functions and loops over the lists accept both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import gt, itemgetter, lt
from typing import Any, TypeAlias

import torch
from torch import Tensor

MAX_PIECE = 1 << 18
"""The number of elements eager mode processes at a time on the CPU: small enough for the cache, enough for threads."""


class Scalar:
    """A hyperparameter inside a traced rule: a 0-dim tensor, so that no value is compiled in.

    ``1 - scalar`` returns ``complement``, which the host computes in double precision. In float32, ``1 - 0.999`` has a
    relative error of 1.3e-5.
    """

    __slots__ = ("complement", "tensor")

    def __init__(self, tensor: Tensor, complement: Tensor) -> None:
        self.tensor = tensor
        self.complement = complement

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = {key: _unwrap(value) for key, value in (kwargs or {}).items()}
        return function(*map(_unwrap, args), **named)

    def __rsub__(self, other: Any) -> Any:
        return self.complement if isinstance(other, int | float) and other == 1 else other - self.tensor

    def __add__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, Tensors) else self.tensor + _unwrap(other)

    def __sub__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, Tensors) else self.tensor - _unwrap(other)

    def __mul__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, Tensors) else self.tensor * _unwrap(other)

    def __truediv__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, Tensors) else self.tensor / _unwrap(other)

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.tensor

    def __pow__(self, exponent: Any) -> Any:
        return self.tensor ** _unwrap(exponent)

    def __neg__(self) -> Tensor:
        return -self.tensor

    # comparisons return tensors, so tracing and validation reject a branch on one

    def __lt__(self, other: Any) -> Any:
        return self.tensor < _unwrap(other)

    def __le__(self, other: Any) -> Any:
        return self.tensor <= _unwrap(other)

    def __gt__(self, other: Any) -> Any:
        return self.tensor > _unwrap(other)

    def __ge__(self, other: Any) -> Any:
        return self.tensor >= _unwrap(other)

    def __eq__(self, other: Any) -> Any:
        return self.tensor == _unwrap(other)

    def __ne__(self, other: Any) -> Any:
        return self.tensor != _unwrap(other)

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"Scalar({self.tensor!r})"

    def __bool__(self) -> bool:
        return bool(self.tensor)

    def __float__(self) -> float:
        return float(self.tensor)

    __radd__, __rmul__ = __add__, __mul__


def _unwrap(value: Any) -> Any:
    """Return the tensor of a Scalar, also inside a list or tuple; return anything else unchanged."""
    if isinstance(value, Scalar):
        return value.tensor
    if type(value) in (list, tuple):
        return type(value)(map(_unwrap, value))
    return value


Number: TypeAlias = float | Scalar
"""A hyperparameter as a rule gets it: a float in eager mode, a Scalar while the rule is traced."""


class Tensors(list[Tensor]):
    """A list of tensors with elementwise operators. Methods that end in ``_`` and ``+=`` etc. work in place.

    The other operand is a list of the same length, a hyperparameter, or a 0-dim tensor. (``getattr(other, "tensor",
    other)`` is the 0-dim tensor of a :class:`Scalar`, and anything else as it is.)

    >>> p, g = Tensors([torch.ones(2), torch.ones(1)]), Tensors([torch.full((2,), 3.0), torch.zeros(1)])
    >>> p -= 0.5 * g
    >>> p
    [tensor([-0.5000, -0.5000]), tensor([1.])]
    """

    def __add__(self, other: Any) -> Tensors:  # type: ignore[override]
        return self._combined(torch._foreach_add, self._addend(other))

    def __sub__(self, other: Any) -> Tensors:
        return self._combined(torch._foreach_sub, self._addend(other))

    def __mul__(self, other: Any) -> Tensors:
        return self._combined(torch._foreach_mul, getattr(other, "tensor", other))

    def __truediv__(self, other: Any) -> Tensors:
        return self._combined(torch._foreach_div, getattr(other, "tensor", other))

    def __neg__(self) -> Tensors:
        return self._like(torch._foreach_neg(self))

    def __rsub__(self, other: Any) -> Tensors:
        return (-self).__add__(other)

    def __rtruediv__(self, other: Any) -> Tensors:
        return self._like(torch._foreach_reciprocal(self)).__mul__(other)

    def __pow__(self, exponent: float) -> Tensors:
        return self._like(torch._foreach_pow(self, exponent))

    __radd__, __rmul__ = __add__, __mul__

    def __iadd__(self, other: Any) -> Tensors:  # type: ignore[override]
        torch._foreach_add_(self, self._operand(self._addend(other)))
        return self

    def __isub__(self, other: Any) -> Tensors:
        torch._foreach_sub_(self, self._operand(self._addend(other)))
        return self

    def __imul__(self, other: Any) -> Tensors:
        torch._foreach_mul_(self, self._operand(getattr(other, "tensor", other)))
        return self

    def __itruediv__(self, other: Any) -> Tensors:
        torch._foreach_div_(self, self._operand(getattr(other, "tensor", other)))
        return self

    def __lt__(self, other: Any) -> Tensors:  # type: ignore[override]
        return self.map(lt, self._repeated(other))

    def __gt__(self, other: Any) -> Tensors:  # type: ignore[override]
        return self.map(gt, self._repeated(other))

    def sqrt(self) -> Tensors:
        """Return the square roots."""
        return self._like(torch._foreach_sqrt(self))

    def sign(self) -> Tensors:
        """Return the signs: -1, 0 or 1."""
        return self._like(torch._foreach_sign(self))

    def abs(self) -> Tensors:
        """Return the absolute values."""
        return self._like(torch._foreach_abs(self))

    def map(self, function: Callable[..., Tensor], *others: Sequence[Any]) -> Tensors:
        """Return ``function(tensor, *values)`` for each tensor, with the values at its place in ``others``.

        The function must be elementwise. Sums over tensors or rows are broadcast to the elements they belong to.
        """
        return Tensors(function(*values) for values in zip(self, *others, strict=True))

    def maximum_(self, other: list[Tensor]) -> Tensors:
        """Take the elementwise maximum, in place."""
        torch._foreach_maximum_(self, other)
        return self

    def clamp_(self, low: Number, high: Number) -> Tensors:
        """Limit each element to the range from ``low`` to ``high``, in place."""
        for limit, number, tensors in (
            (low, torch._foreach_clamp_min_, torch._foreach_maximum_),
            (high, torch._foreach_clamp_max_, torch._foreach_minimum_),
        ):
            if isinstance(limit, Scalar):
                tensors(self, [limit.tensor] * len(self))
            else:
                number(self, limit)
        return self

    def copy_(self, other: list[Tensor]) -> Tensors:
        """Copy the values of other tensors, converted to this list's dtypes."""
        torch._foreach_copy_(self, other)
        return self

    def add_(self, values: Tensors, alpha: Number | Tensor) -> Tensors:
        """Add scaled values in place: ``self += alpha * values``, in eager mode without a temporary."""
        if isinstance(alpha, float):
            torch._foreach_add_(self, values, alpha=alpha)
        else:
            self += alpha * values
        return self

    def ema_(self, values: Tensors, decay: Number) -> Tensors:
        """Update an exponential moving average in place: ``self = decay * self + (1 - decay) * values``."""
        self *= decay
        self += (1 - decay) * values
        return self

    def lerp_(self, values: Tensors, weight: Number | Tensor) -> Tensors:
        """Interpolate in place: ``self += weight * (values - self)``; exact where both are equal."""
        self += (values - self) * weight
        return self

    def sum_of_squares(self) -> Tensors:
        """Return the sum of the squares of each tensor, as 0-dim tensors, summed in :func:`sum_dtype`."""
        return Tensors(map(_sum_of_squares, self))

    def row_sums(self, other: Tensors) -> Tensors:
        """Return the sum of ``self * other`` over each row of 2-D tensors, as 1-D tensors, in :func:`sum_dtype`."""
        products = zip(self, other, strict=True)
        return Tensors((a * b).sum(dim=1, dtype=sum_dtype(a)) for a, b in products)

    @property
    def has_rows(self) -> bool:
        """Whether a rowwise rule sees rows: the parameters have two or more dimensions."""
        return self[0].ndim > 1

    def row_lengths(self) -> list[Any]:
        """Return the length of the rows of each 2-D tensor."""
        return [tensor.shape[1] for tensor in self]

    def total(self, dtype: torch.dtype | None = None) -> Tensors:
        """Return the sum of each tensor of :meth:`row_sums`, as 0-dim tensors."""
        return Tensors(tensor.sum(dtype=dtype) for tensor in self)

    def as_columns(self) -> Tensors:
        """Return 1-D tensors that have a value for each row as columns, so that they can be combined with 2-D ones."""
        return Tensors(tensor.unsqueeze(1) for tensor in self)

    def _like(self, tensors: Iterable[Tensor]) -> Tensors:
        """Return a list with values for the same elements."""
        return Tensors(tensors)

    def _combined(self, operation: Callable[..., Any], other: Any) -> Tensors:
        """Return the result of a list operation with an operand."""
        return Tensors(operation(self, other))

    def _operand(self, other: Any) -> Any:
        """Return the operand of a list operation that updates this list."""
        return other

    def _repeated(self, other: Any) -> Any:
        """Return an operand for each tensor."""
        return other if isinstance(other, list | tuple) else [getattr(other, "tensor", other)] * len(self)

    def _addend(self, other: Any) -> Any:
        """Return the operand of a sum; ``_foreach_add`` would read a 0-dim tensor back to the host, so repeat it."""
        other = getattr(other, "tensor", other)
        return [other] * len(self) if isinstance(other, Tensor) else other


class BlockTensors(Tensors):
    """1-D tensors as 2-D ones, with a block of elements in each row. A rowwise rule sees no rows."""

    has_rows = False


def where(condition: Tensors, chosen: Any, other: Any) -> Tensors:
    """Return elements of ``chosen`` where the condition holds, else of ``other``; one of both may be a number."""
    operands = zip(condition, condition._repeated(chosen), condition._repeated(other), strict=True)
    return Tensors(torch.where(*each) for each in operands)


def _sum_of_squares(tensor: Tensor) -> Tensor:
    if type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.numel() > MAX_PIECE:
        # eager mode sums in parts whose temporaries fit into the cache; traced tensors are FakeTensors
        parts = torch.split(tensor.view(-1), MAX_PIECE)
        return torch.stack([_sum_of_squares(part) for part in parts]).sum()
    return (tensor * tensor).sum(dtype=sum_dtype(tensor))


AllReduce: TypeAlias = Callable[..., tuple[Tensors, ...]]
"""Takes sums over local shards, as several lists of 0-dim tensors, and returns the sums over all shards."""

MeanOver: TypeAlias = Callable[[Tensors, int], Tensors]
"""Takes matrices and a dimension, -1 or -2; returns the means over it and all shards. It stays with the size 1."""

FEW = 16
"""Rows of at most this many elements are short: their means are computed in their own dtype."""


def mean(dim: int, tensor: Tensor) -> Tensor:
    """Return the means over a dimension, which stays with the size 1."""
    size = tensor.shape[dim]
    dtype = tensor.dtype if isinstance(size, int) and size <= FEW else sum_dtype(tensor)
    return materialize((tensor.sum(dim, keepdim=True, dtype=dtype) / size).to(tensor.dtype))


def root_of_product(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the square root of the product of a value for each row and one for each column of a matrix.

    Compiled code takes the roots of rows and columns once, and an element costs a product. If rows are short, it stores
    the products instead, so that what follows is one loop over all elements of a stack, and not one for each row.
    """
    length = columns.shape[-1]
    if isinstance(length, int) and length <= FEW:
        return materialize(materialize(rows) * columns).sqrt()
    return materialize(rows.sqrt()) * materialize(columns.sqrt())


def sum_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype to sum a tensor in."""
    return dtype_of_sums(tensor.dtype, tensor.device)


def dtype_of_sums(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype to sum tensors of ``dtype`` in: float64 on the CPU, else ``dtype`` itself.

    On the CPU Inductor sums sequentially, which is inaccurate in float32. Accelerators sum in trees, which is accurate
    enough, and float64 is slow or missing there.
    """
    return torch.float64 if device.type == "cpu" else dtype


def materialize(tensor: Tensor) -> Tensor:
    """Return a view of the whole tensor that makes Inductor store it, instead of recomputing it for every element.

    Inductor has to store the input of ``as_strided`` in memory. On CUDA the tensor is returned as it is: Triton
    computes once for each program what does not depend on the element.
    """
    if tensor.device.type == "cuda":
        return tensor
    return tensor.as_strided(tensor.shape, tensor.stride())


def picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that selects the items at these indices; it uses a slice if they are consecutive."""
    consecutive = slice(indices[0], indices[-1] + 1) if indices else slice(0)
    same = list(indices) == list(range(consecutive.stop))[consecutive]
    return itemgetter(consecutive) if same else itemgetter(*indices)
