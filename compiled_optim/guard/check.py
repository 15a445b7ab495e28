"""The guard: checks on every step that everything the plan was built on is still as it was.

Units run without Dynamo's guards (see ``backends.inductor``), so this is the only check between a step and memory that
has moved. It compares the identity of parameters and states, the address of their memory, and the metadata (dtype,
device, shape, strides, layout, conj and neg bits) of parameters and gradients, all by C-level loops over whole lists.
In-place changes of values do not matter. The guard only says that something differs; ``tracker`` finds out what.

Touching a tensor from Python takes 0.06 µs, so this is a good part of what a step costs the host. States are left out
until user code has accessed them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from compiled_optim.engine.sharding import has_dtensor, local_shard


class Guard:
    """What one plan assumes about tensors that others can change."""

    def __init__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        state: Mapping[Any, Any],
        bound_params: Sequence[Tensor],
        bound_states: Sequence[Tensor],
    ) -> None:
        """Remember parameters and states by identity, and the bound ones by memory too."""
        self._params = list(params)
        self._bound_params = tuple(bound_params)
        self.is_sharded = has_dtensor(bound_params)
        bound = self._local_params()
        self._addresses = list(map(Tensor.data_ptr, bound))
        self._check_params = metadata_check(bound)
        self._check_grads = metadata_check(grads)
        self._state = _state_values(state)
        self._bound_states = list(bound_states)
        self._state_addresses = list(map(Tensor.data_ptr, bound_states))

    def holds(self, params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> bool:
        """Return True if parameters and gradients are what the plan was built on, in the same memory."""
        bound = self._local_params() if self.is_sharded else self._bound_params
        return (
            len(params) == len(self._params)
            and all(map(is_, params, self._params))
            and list(map(Tensor.data_ptr, bound)) == self._addresses
            and self._check_params(bound)
            and self._check_grads(grads)
        )

    def state_holds(self, state: Mapping[Any, Any]) -> bool:
        """Return True if the states are what the plan was built on, in the same memory."""
        addresses = list(map(Tensor.data_ptr, self._bound_states))
        return addresses == self._state_addresses and same_objects(_state_values(state), self._state)

    def _local_params(self) -> Sequence[Tensor]:
        """Return what this process holds of the bound parameters."""
        return list(map(local_shard, self._bound_params))


def same_objects(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return True if two sequences hold the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


Check = Callable[[Sequence[Tensor | None]], bool]


def metadata_check(tensors: Sequence[Tensor | None]) -> Check:
    """Return a function that checks that other tensors have the metadata ``tensors`` have now, or are None too.

    Dynamo's own C++ check takes 0.06 µs a tensor. It is private, so :func:`plain_metadata_check` stands in for it where
    it is missing.
    """
    present = [i for i, tensor in enumerate(tensors) if tensor is not None]
    if not present:
        return lambda others: not any(other is not None for other in others)
    given = [tensor for tensor in tensors if tensor is not None]
    try:
        from torch._C._dynamo.guards import TensorGuards

        check = TensorGuards(
            *given,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in given],  # type: ignore[misc]
            dynamic_dims_strides=[list(tensor.stride()) for tensor in given],  # type: ignore[misc]
        ).check
    except (ImportError, TypeError):
        return plain_metadata_check(tensors)
    if len(given) == len(tensors):
        return lambda others: bool(check(*others))  # it compares types first, so None is no tensor to it
    absent = [tensor is None for tensor in tensors]
    return lambda others: [o is None for o in others] == absent and bool(check(*[others[i] for i in present]))


def plain_metadata_check(tensors: Sequence[Tensor | None]) -> Check:
    """:func:`metadata_check` in plain Python."""
    expected = [_metadata(tensor) for tensor in tensors]
    return lambda others: [_metadata(tensor) for tensor in others] == expected


def _metadata(tensor: Tensor | None) -> tuple[object, ...] | None:
    if tensor is None:
        return None
    strides = tensor.stride() if tensor.layout == torch.strided else None
    bits = (tensor.is_conj(), tensor.is_neg(), tensor.requires_grad)
    return type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.shape, strides, bits


def _state_values(state: Mapping[Any, Any]) -> list[Any]:
    return [value for values in state.values() if isinstance(values, dict) for value in values.values()]
