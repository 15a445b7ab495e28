"""The types of tensors: plain tensors, DTensors, and tensors without memory that compiled code could use."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from compiled_optim.torch_private import fake_tensor_types, is_traceable_wrapper_subclass

PLAIN_TYPES = {Tensor, torch.nn.Parameter, type(None)}


def is_dtensor(tensor: Tensor) -> bool:
    """Return True for a DTensor."""
    if type(tensor) in PLAIN_TYPES:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # if it is not imported, there are none
    return module is not None and isinstance(tensor, module.DTensor)


def has_dtensor(tensors: Sequence[Tensor | None]) -> bool:
    """Return True if one of the tensors is a DTensor; fast if none is."""
    return not PLAIN_TYPES.issuperset(map(type, tensors)) and any(map(is_dtensor, filter(torch.is_tensor, tensors)))


def local_shard(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, or a plain tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    shard: Tensor = as_dtensor(tensor)._local_tensor
    wait = getattr(shard, "wait", None)  # the result of an asynchronous collective
    return wait() if wait is not None else shard


def as_dtensor(tensor: Tensor) -> Any:
    """Return a DTensor as it is, for access to its attributes."""
    return tensor


def has_memory(tensor: Tensor) -> bool:
    """Return True if a tensor, or its local shard, has an address. Its storage may be freed.

    False for tensors that are lazy, sparse, fake, on the meta device, or that wrap other tensors.
    """
    if type(tensor) not in PLAIN_TYPES:
        if is_lazy(tensor) or is_fake(tensor) or (not is_dtensor(tensor) and is_wrapper(tensor)):
            return False
        tensor = local_shard(tensor)
    return tensor.layout == torch.strided and tensor.device.type != "meta"


def is_fake(tensor: object) -> bool:
    """Return True for a FakeTensor."""
    return isinstance(tensor, fake_tensor_types())


def is_wrapper(tensor: Tensor) -> bool:
    """Return True for a tensor subclass that keeps its values in other tensors, such as a quantised weight."""
    wrapper: object = tensor  # otherwise mypy concludes that the rest is unreachable
    if is_fake(tensor) or is_traceable_wrapper_subclass(wrapper):
        return not is_fake(tensor)
    # PrivateUse1 devices may keep their memory outside the storage
    without_storage = ("meta", torch.device("privateuseone").type)
    if is_lazy(tensor) or tensor.layout != torch.strided or tensor.device.type in without_storage:
        return False
    # a freed storage has no bytes, that of a wrapper has some, but no address
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() > 0 and tensor.data_ptr() == 0
