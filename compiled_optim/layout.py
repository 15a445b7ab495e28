"""How tensors of any shape become the views that programs work on.

A *dense* tensor covers its memory without gaps or overlaps, in whatever order of dimensions (contiguous,
channels_last, transposed): its memory is viewed as 1-D. For rules that need *rows*, it is viewed as 2-D, one row for
each index of the first dimension; then that dimension has to be the outermost in memory as well. A parameter that is
not laid out so is *scattered*: it is worked on in a scratch copy that is. States and gradients pair with a parameter
element by element if they have the strides of its *home*, the memory it is worked on in.
"""

from __future__ import annotations

import torch
from torch import Tensor


def home_strides(param: Tensor, rows: bool) -> tuple[int, ...]:
    """The strides of the memory a parameter is worked on in; its own if that can be its own memory."""
    # torch keeps the strides of a dense tensor, and makes those of another one dense in the same order
    strides = torch.empty_like(param, device="meta", requires_grad=False).stride()
    if rows and param.numel() and param.shape[0] > 1 and strides[0] * param.shape[0] != param.numel():
        return torch.empty(param.shape, device="meta").stride()
    return strides


def is_home(param: Tensor, rows: bool) -> bool:
    """Whether a parameter can be worked on in its own memory."""
    in_place = param.is_contiguous() or param.stride() == home_strides(param, rows)
    return in_place and not has_lazy_bits(param)


def fits(param: Tensor, other: Tensor, rows: bool) -> bool:
    """Whether ``other`` pairs with the parameter's home as it is."""
    if has_lazy_bits(other) or other.shape != param.shape:
        return False
    if param.is_contiguous() and other.is_contiguous():
        return True
    return other.stride() == home_strides(param, rows)


def view(tensor: Tensor, rows: bool) -> Tensor:
    """A real 1-D view of the memory of a tensor that has the strides of a home, or a 2-D view of its rows."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(view_shape(tensor, rows)) if rows else flat


def view_shape(tensor: Tensor, rows: bool) -> tuple[int, ...]:
    """The shape of :func:`view`."""
    size = tensor.numel() * (2 if tensor.is_complex() else 1)
    if rows:
        return tensor.shape[0], size // tensor.shape[0] if tensor.shape[0] else 0
    return (size,)


def like(param: Tensor, source: Tensor, rows: bool, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of ``source`` laid out as the parameter's home."""
    strides = home_strides(param, rows)
    copy = torch.empty_strided(param.shape, strides, dtype=dtype or source.dtype, device=param.device)
    return copy.copy_(source)


def full(param: Tensor, value: float, rows: bool) -> Tensor:
    """A tensor laid out as the parameter's home that holds one value, in the real and the imaginary part if complex."""
    tensor = torch.empty_strided(param.shape, home_strides(param, rows), dtype=param.dtype, device=param.device)
    (torch.view_as_real(tensor) if tensor.is_complex() else tensor).fill_(value)
    return tensor


def paired_dtype(param: Tensor, grad: Tensor) -> torch.dtype:
    """The dtype in which a gradient is used: its own, which may be wider than the parameter's, if it is of its kind."""
    alike = grad.is_complex() == param.is_complex() and (grad.is_complex() or grad.is_floating_point())
    return grad.dtype if alike else param.dtype


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a :func:`view`."""
    return dtype.to_real() if dtype.is_complex else dtype


def has_lazy_bits(tensor: Tensor) -> bool:
    """Whether the values in memory differ from the tensor's by a pending conjugation or negation."""
    return tensor.is_conj() or tensor.is_neg()


def is_freed(tensor: Tensor) -> bool:
    """Whether the storage was taken away from under the tensor (``untyped_storage().resize_``).

    Devices added to torch from outside may keep their memory elsewhere, so nothing is said about those.
    """
    if tensor.device.type == torch._C._get_privateuse1_backend_name():
        return False
    needed = (tensor.storage_offset() + span(tensor)) * tensor.element_size()
    return tensor.untyped_storage().nbytes() < needed


def span(tensor: Tensor) -> int:
    """How far a tensor reaches in memory, in elements from its first to behind its last."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements share memory because the tensor was expanded, so that it cannot be updated in place."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
