"""How tensors of any shape become the 1-D lists that programs work on.

A *dense* tensor covers its memory without gaps or overlaps, in whatever order of dimensions (contiguous,
channels_last, transposed): its memory is viewed as 1-D. A *scattered* one (a slice with gaps) is worked on in a dense
scratch copy. A state or gradient pairs with its parameter element by element only if both have the same strides.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides a dense tensor of this shape and order of dimensions has; its own if it is dense."""
    return torch.empty_like(tensor, device="meta", requires_grad=False).stride()


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor covers its memory without gaps or overlaps."""
    return tensor.is_contiguous() or dense_strides(tensor) == tensor.stride()


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements share memory because the tensor was expanded, so that it cannot be updated in place."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def flat(tensor: Tensor) -> Tensor:
    """A 1-D real view of a dense tensor's memory."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def real_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of :func:`flat`'s view."""
    return tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype


def like(param: Tensor, source: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of ``source`` laid out as ``param``'s states are."""
    strides = dense_strides(param)
    copy = torch.empty_strided(param.shape, strides, dtype=dtype or source.dtype, device=param.device)
    return copy.copy_(source)


def fits(param: Tensor, other: Tensor) -> bool:
    """Whether ``other`` pairs with the parameter's 1-D view as it is."""
    if param.is_contiguous() and other.is_contiguous():
        return True
    return other.stride() == dense_strides(param)
