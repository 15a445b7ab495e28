"""The guard: on every step, is everything the plan was built on still as it was?

Dynamo's guards are not on the way (see ``backends.inductor``), so this is the only check between a step and memory that
has moved. It compares the identity of parameters and states, the address of their memory, and the metadata (dtype,
device, shape, strides, layout, conj and neg bits) of parameters and gradients, all by C-level loops over whole lists.
In-place changes of values are not looked at. It only says that something is different; ``reallocation`` finds out what.

Merely to touch a tensor from Python takes 0.06 µs, so this is a good part of what a step costs the host. States are
left out until somebody could have changed one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from compiled_optim import shards


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
        """Remember parameters and states by identity, and what is bound of them by memory too."""
        self._params = list(params)
        self._bound_params = tuple(bound_params)
        self._is_split = shards.any_dtensor(bound_params)
        self._addresses = list(map(Tensor.data_ptr, self._bound_here()))
        self._same_params = metadata_check(self._bound_here())
        self._same_grads = metadata_check(grads)
        self._state = _state_values(state)
        self._bound_states = list(bound_states)
        self._state_addresses = list(map(Tensor.data_ptr, bound_states))

    def holds(self, params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> bool:
        """Whether parameters and gradients are what the plan was built on, in the same memory."""
        bound = self._bound_here()
        return (
            same_objects(params, self._params)
            and list(map(Tensor.data_ptr, bound)) == self._addresses
            and self._same_params(bound)
            and self._same_grads(grads)
        )

    def _bound_here(self) -> Sequence[Tensor]:
        """What this process holds of the bound parameters."""
        return list(map(shards.local, self._bound_params)) if self._is_split else self._bound_params

    def state_holds(self, state: Mapping[Any, Any]) -> bool:
        """The same of the states."""
        addresses = list(map(Tensor.data_ptr, self._bound_states))
        return addresses == self._state_addresses and same_objects(_state_values(state), self._state)


def same_objects(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences hold the very same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


Check = Callable[[Sequence[Tensor | None]], bool]


def metadata_check(tensors: Sequence[Tensor | None]) -> Check:
    """A function that tells whether as many tensors have the metadata, or are None, that ``tensors`` have now.

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
