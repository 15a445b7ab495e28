"""A device of type ``npu`` whose tensors live in CPU memory, to run device-bound code without the hardware.

Every operation unwraps to CPU tensors and wraps the results. It changes torch for the whole process, so it is imported
only in processes of its own. Tensors of this device are always contiguous and have no address: that one has moved
within the device cannot be seen, and none can be copied with deepcopy.
"""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_libraries = []
_memory: dict[int, torch.Tensor] = {}
_kept: list[torch.UntypedStorage] = []


def _wrap(memory: torch.Tensor) -> torch.Tensor:
    tensor = torch._C._acc.create_empty_tensor(memory.shape, memory.dtype)
    # by storage: detach() and Parameter() make new tensor objects over the same one; nothing is ever freed
    _memory[tensor.untyped_storage()._cdata] = memory
    _kept.append(tensor.untyped_storage())
    return tensor


def _unwrap(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "npu":
        return tensor
    return _memory[tensor.untyped_storage()._cdata]


def _on_cpu(operation, *args, **kwargs):
    inputs = {
        id(_unwrap(x)): x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.device.type == "npu"
    }
    to_cpu = kwargs.get("device") is not None and kwargs["device"].type == "cpu"
    args, kwargs = tree_map_only(torch.Tensor, _unwrap, (args, kwargs))
    args, kwargs = tree_map_only(torch.device, lambda d: torch.device("cpu") if d.type == "npu" else d, (args, kwargs))
    results = operation(*args, **kwargs)
    return tree_map_only(torch.Tensor, lambda r: inputs.get(id(r), r if to_cpu else _wrap(r)), results)


def _copy_from(source, destination, non_blocking=False):
    _unwrap(destination).copy_(_unwrap(source))
    return destination


def install() -> None:
    """Give torch the device."""
    _setup_privateuseone_for_python_backend("npu")
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(_on_cpu, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name, operation in (
        ("empty.memory_format", torch.ops.aten.empty.memory_format),
        ("empty_strided", lambda size, stride, **kwargs: torch.empty(size, **kwargs)),
        ("view.dtype", torch.ops.aten.view.dtype),  # its default keeps the storage, by which memory is found here
        ("abs", torch.ops.aten.abs.default),  # its default writes into an empty tensor, which cannot grow here
    ):
        aten.impl(name, lambda *args, operation=operation, **kwargs: _on_cpu(operation, *args, **kwargs), "PrivateUse1")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    aten.impl("_local_scalar_dense", lambda tensor: _unwrap(tensor).item(), "PrivateUse1")
    _libraries.extend([fallback, aten])
