"""The guard: check before every step that the plan is still valid.

Units run without Dynamo's guards (see ``backends.inductor``), so only this check prevents a step from writing to freed
or stale memory. It compares the identity of parameters and states, their addresses, and the metadata of parameters and
gradients (dtype, device, shape, strides, layout, conj and neg bits), with C-level loops over whole lists. In-place
changes of values are allowed. The guard detects that something differs; ``tracker`` finds out what.

Access to a tensor from Python takes 0.06 µs, so the check is a large part of the host time of a step. States are not
checked until user code has accessed them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from compiled_optim.engine.sharding import has_dtensor, local_shard


class Guard:
    """The assumptions of one plan about tensors that user code can change."""

    def __init__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        state: Mapping[Any, Any],
        bound_params: Sequence[Tensor],
        bound_states: Sequence[Tensor],
    ) -> None:
        """Record the identity of parameters and states, and the addresses of the bound ones."""
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
        """Return True if parameters and gradients match those of the plan, and parameters are in the same memory."""
        bound = self._local_params() if self.is_sharded else self._bound_params
        return (
            len(params) == len(self._params)
            and all(map(is_, params, self._params))
            and list(map(Tensor.data_ptr, bound)) == self._addresses
            and self._check_params(bound)
            and self._check_grads(grads)
        )

    def state_holds(self, state: Mapping[Any, Any]) -> bool:
        """Return True if the states are the objects of the plan, in the same memory."""
        addresses = list(map(Tensor.data_ptr, self._bound_states))
        return addresses == self._state_addresses and same_objects(_state_values(state), self._state)

    def _local_params(self) -> Sequence[Tensor]:
        """Return the local shards of the bound parameters."""
        return list(map(local_shard, self._bound_params))


def same_objects(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return True if two sequences hold the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


Check = Callable[[Sequence[Tensor | None]], bool]


def metadata_check(tensors: Sequence[Tensor | None]) -> Check:
    """Return a function that compares the metadata of other tensors with that of ``tensors`` now. None matches None.

    It uses Dynamo's C++ check, which takes 0.06 µs per tensor. That check is private, so :func:`plain_metadata_check`
    replaces it where it is missing.
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
        return lambda others: bool(check(*others))  # it compares types first, so it rejects None
    absent = [tensor is None for tensor in tensors]
    return lambda others: [o is None for o in others] == absent and bool(check(*[others[i] for i in present]))


def plain_metadata_check(tensors: Sequence[Tensor | None]) -> Check:
    """Return the same function as :func:`metadata_check`, in plain Python."""
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
