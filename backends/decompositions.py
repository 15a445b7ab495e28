"""Decompose ``torch._foreach_*`` into one operation per tensor, for compilers that lack them or cannot fuse them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.torch_private import OpOverload

NAMES = (
    *("abs", "copy", "exp", "log", "neg", "reciprocal", "rsqrt", "sigmoid", "sign", "sqrt", "tanh"),
    *("add", "clamp_max", "clamp_min", "div", "maximum", "minimum", "mul", "pow", "sub"),
)
BY_A_NUMBER = {"maximum": "clamp_min", "minimum": "clamp_max"}
OVERLOADS = ("default", "List", "Scalar", "ScalarList", "Tensor")

Decompositions = dict[OpOverload, Callable[..., Any]]


def foreach_decompositions() -> Decompositions:
    """Return a decomposition of every ``torch._foreach_*`` operation, in-place ones too."""
    found: Decompositions = {}
    for name in NAMES:
        for operation, single in _overloads(f"_foreach_{name}", name):
            found[operation] = _copies if name == "copy" else _each(single)
        for operation, single in _overloads(f"_foreach_{name}_", name):
            found[operation] = _copy_each_ if name == "copy" else _each_in_place(single)
    return found


def missing_foreach_decompositions(has_converter: Callable[[OpOverload], bool]) -> Decompositions:
    """Return a decomposition of every functional ``torch._foreach_*`` operation that a compiler does not convert.

    An operation over two lists is also decomposed if their shapes or dtypes differ: foreach kernels do not broadcast.
    """
    found: Decompositions = {}
    for name in NAMES:
        for operation, single in _overloads(f"_foreach_{name}", name):
            if not has_converter(operation):
                found[operation] = _copies if name == "copy" else _each(single)
            elif operation._overloadname == "List":
                found[operation] = _each_unless_alike(single)
    return found


def skip_whole_view(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    """Decompose an ``as_strided`` view that equals its tensor to the tensor itself; see ``tensors.materialize``."""
    same = (tuple(size), tuple(stride), offset or 0) == (tensor.shape, tensor.stride(), tensor.storage_offset())
    return tensor if same else NotImplemented


def skip_whole_copy(tensor: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    """Decompose a copy over all of a tensor to the source itself, in the dtype of the tensor."""
    return (
        source.to(tensor.dtype) if source.shape == tensor.shape and source.device == tensor.device else NotImplemented
    )


def skip_clone(tensor: Tensor, memory_format: torch.memory_format | None = None) -> Tensor:
    """Decompose a copy to the tensor itself. A graph without operations in place does not need it."""
    return tensor


def _overloads(packet_name: str, name: str) -> list[tuple[OpOverload, str]]:
    """Return the overloads of a foreach operation, each with the name of the operation on one tensor."""
    packet = getattr(torch.ops.aten, packet_name, None)
    if packet is None:
        return []
    return [
        (getattr(packet, overload), BY_A_NUMBER.get(name, name) if overload.startswith("Scalar") else name)
        for overload in OVERLOADS
        if overload in packet.overloads()
    ]


def _each(name: str) -> Callable[..., list[Tensor]]:
    single = getattr(torch.ops.aten, name)

    def apply(tensors: Sequence[Tensor], others: Any = None, **kwargs: Any) -> list[Tensor]:
        if others is None:
            return [single(tensor) for tensor in tensors]
        each = others if isinstance(others, (list, tuple)) else [others] * len(tensors)
        return [single(tensor, other, **kwargs) for tensor, other in zip(tensors, each, strict=True)]

    return apply


def _each_in_place(name: str) -> Callable[..., None]:
    each = _each(name)

    def apply(tensors: Sequence[Tensor], *others: Any, **kwargs: Any) -> None:
        _copy_each_(tensors, each(tensors, *others, **kwargs))

    return apply


def _copies(tensors: Sequence[Tensor], sources: Sequence[Tensor], non_blocking: bool = False) -> list[Tensor]:
    """Return copies of the sources in the dtypes of the targets. Unlike ``copy``, this does not broadcast."""
    return [source.to(tensor.dtype, copy=True) for tensor, source in zip(tensors, sources, strict=True)]


def _copy_each_(tensors: Sequence[Tensor], sources: Sequence[Tensor], non_blocking: bool = False) -> None:
    for tensor, source in zip(tensors, sources, strict=True):
        tensor.copy_(source)


def _each_unless_alike(name: str) -> Callable[..., Any]:
    each = _each(name)

    def apply(tensors: Sequence[Tensor], others: Sequence[Tensor], **kwargs: Any) -> Any:
        alike = all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(tensors, others, strict=True))
        return NotImplemented if alike else each(tensors, others, **kwargs)

    return apply
