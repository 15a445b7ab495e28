"""Views of tensors of any shape and strides that programs work on.

A *dense* tensor covers its memory without gaps or overlaps, in any order of dimensions (contiguous, channels_last,
transposed): programs see its memory as one dimension. Rules that need rows see two dimensions, one row for each index
of the first; then that dimension has to be the outermost in memory as well. Rules for matrices see three dimensions,
the last two of a contiguous tensor and all others as one. This view is the *working view* of a parameter, and ``rows``
is the number of its dimensions after the first. A parameter that has none is copied into a dense temporary before a
step and back after it. States and gradients pair with a parameter element by element if they have the strides of its
working view.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def working_strides(param: Tensor, rows: int) -> tuple[int, ...]:
    """Return the strides of the memory that is updated: the parameter's own if it has a working view, else a copy's."""
    # empty_like keeps the strides of a dense tensor; for others it makes dense strides in the same order
    strides = torch.empty_like(param, device="meta", requires_grad=False).stride()
    if rows > 1:
        return torch.empty(param.shape, device="meta").stride()
    if rows and param.numel() and param.shape[0] > 1 and strides[0] * param.shape[0] != param.numel():
        return torch.empty(param.shape, device="meta").stride()
    return strides


def has_working_view(param: Tensor, rows: int) -> bool:
    """Return True if a parameter can be updated in its own memory."""
    dense = param.is_contiguous() or param.stride() == working_strides(param, rows)
    return dense and not has_lazy_bits(param)


def pairs_with(param: Tensor, other: Tensor, rows: int) -> bool:
    """Return True if ``other`` matches the parameter's working view element by element."""
    if has_lazy_bits(other) or other.shape != param.shape:
        return False
    if param.is_contiguous() and other.is_contiguous():
        return True
    return other.stride() == working_strides(param, rows)


def working_view(tensor: Tensor, rows: int) -> Tensor:
    """Return a real 1-D view of a tensor's memory, or a 2-D view of its rows. The tensor must have working strides."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(view_shape(tensor, rows)) if rows else flat


def view_shape(tensor: Tensor, rows: int) -> tuple[int, ...]:
    """Return the shape of :func:`working_view`."""
    size = tensor.numel() * (2 if tensor.is_complex() else 1)
    if rows > 1:
        *outer, height, width = tensor.shape
        return math.prod(outer), height, width
    if rows:
        return tensor.shape[0], size // tensor.shape[0] if tensor.shape[0] else 0
    return (size,)


def copy_like(param: Tensor, source: Tensor, rows: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy of ``source`` with the parameter's working strides."""
    strides = working_strides(param, rows)
    copy = torch.empty_strided(param.shape, strides, dtype=dtype or source.dtype, device=param.device)
    return copy.copy_(source)


def full_like(param: Tensor, value: float, rows: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor with the parameter's working strides that holds one value, in both parts if complex."""
    if param.is_contiguous():
        if value == 0:
            return torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format)
        tensor = torch.empty_like(param, dtype=dtype, memory_format=torch.contiguous_format)
    else:
        strides = working_strides(param, rows)
        tensor = torch.empty_strided(param.shape, strides, dtype=dtype, device=param.device)
    (torch.view_as_real(tensor) if tensor.is_complex() else tensor).fill_(value)
    return tensor


def grad_dtype(param: Tensor, grad: Tensor) -> torch.dtype:
    """Return the dtype in which a gradient is used: its own or, if only one of both is complex, the parameter's.

    An integer gradient is used in the dtype of the parameter too.
    """
    alike = grad.is_complex() == param.is_complex() and (grad.is_complex() or grad.is_floating_point())
    return grad.dtype if alike else param.dtype


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a :func:`working_view`."""
    return dtype.to_real() if dtype.is_complex else dtype


def has_lazy_bits(tensor: Tensor) -> bool:
    """Return True if the conj or neg bit is set, so that the memory does not hold the values of the tensor."""
    return tensor.is_conj() or tensor.is_neg()


def is_steppable(param: Tensor) -> bool:
    """Return True if a parameter has memory that can be updated in place."""
    if param.layout != torch.strided or param.device.type == "meta":
        return False
    # a contiguous tensor is not expanded, and it is not freed if its storage is large enough for all its elements
    return not (is_freed(param) or (not param.is_contiguous() and is_expanded(param)))


def is_freed(tensor: Tensor) -> bool:
    """Return True if the storage was resized to less than the tensor needs (``untyped_storage().resize_``).

    Always False for PrivateUse1 devices, which may keep their memory outside the storage.
    """
    if not tensor.numel() or tensor.device.type == torch.device("privateuseone").type:
        return False
    extent = tensor.numel() if tensor.is_contiguous() else span(tensor)
    return tensor.untyped_storage().nbytes() < (tensor.storage_offset() + extent) * tensor.element_size()


def span(tensor: Tensor) -> int:
    """Return the extent of a tensor in memory, in elements, from its first to its last element."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def without_memory(tensor: Tensor) -> Tensor:
    """Return a tensor with the same metadata, except for lazy bits, that holds no memory."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    made.untyped_storage().resize_(0)
    return made


def is_expanded(tensor: Tensor) -> bool:
    """Return True if elements share memory because the tensor was expanded, so that it cannot be updated in place."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
