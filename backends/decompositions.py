"""List operations as operations on each tensor, for compilers that lack them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

NAMES = (
    *("abs", "copy", "exp", "log", "neg", "reciprocal", "rsqrt", "sigmoid", "sign", "sqrt", "tanh"),
    *("add", "clamp_max", "clamp_min", "div", "maximum", "minimum", "mul", "pow", "sub"),
)
BY_A_NUMBER = {"maximum": "clamp_min", "minimum": "clamp_max"}
OVERLOADS = ("default", "List", "Scalar", "ScalarList", "Tensor")


def foreach_decompositions(has_converter: Callable[[OpOverload], bool]) -> dict[OpOverload, Callable[..., Any]]:
    """A decomposition of every ``torch._foreach_*`` operation that a compiler does not convert as it is.

    One over two lists is taken apart in any case where their shapes differ: kernels for lists do not broadcast.
    """
    found: dict[OpOverload, Callable[..., Any]] = {}
    for name in NAMES:
        packet = getattr(torch.ops.aten, f"_foreach_{name}")
        for overload in set(OVERLOADS) & set(packet.overloads()):
            operation = getattr(packet, overload)
            if not has_converter(operation):
                single = BY_A_NUMBER.get(name, name) if overload.startswith("Scalar") else name
                found[operation] = _copies if name == "copy" else _each(single)
            elif overload == "List":
                found[operation] = _each_unless_alike(name)
    return found


def whole_view(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    """A view by strides that shows all of a tensor as it is is the tensor: see :func:`compiled_optim.lists.settled`."""
    same = (tuple(size), tuple(stride), offset or 0) == (tensor.shape, tensor.stride(), tensor.storage_offset())
    return tensor if same else NotImplemented


def _each(name: str) -> Callable[..., list[Tensor]]:
    single = getattr(torch.ops.aten, name)

    def apply(tensors: Sequence[Tensor], others: Any = None, **kwargs: Any) -> list[Tensor]:
        if others is None:
            return [single(tensor) for tensor in tensors]
        each = others if isinstance(others, (list, tuple)) else [others] * len(tensors)
        return [single(tensor, other, **kwargs) for tensor, other in zip(tensors, each, strict=True)]

    return apply


def _copies(tensors: Sequence[Tensor], sources: Sequence[Tensor], non_blocking: bool = False) -> list[Tensor]:
    """The sources in the dtypes of what they are copied to: a copy as such would be broadcast too."""
    return [source.to(tensor.dtype, copy=True) for tensor, source in zip(tensors, sources, strict=True)]


def _each_unless_alike(name: str) -> Callable[..., Any]:
    each = _each(name)

    def apply(tensors: Sequence[Tensor], others: Sequence[Tensor], **kwargs: Any) -> Any:
        alike = all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(tensors, others, strict=True))
        return NotImplemented if alike else each(tensors, others, **kwargs)

    return apply
