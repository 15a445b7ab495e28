"""The guard: on every step, is everything the plan was built on still as it was?

Dynamo's guards are not on the way (see ``backends.inductor``), so this is the only check between a step and memory that
has moved. It compares the identity of parameters and states, the address of their memory, and the metadata (dtype,
device, shape, strides, layout, conj and neg bits) of parameters and gradients, all by C-level loops over whole lists.
In-place changes of values are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Description(NamedTuple):
    """What can be told apart about a strided tensor without looking at its values."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Description:
        """Describe a tensor."""
        return cls(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


@dataclass(frozen=True)
class Change:
    """One parameter that was reallocated: what changed, and from what to what."""

    parameter: str
    kind: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.parameter}: {self.kind} changed from {self.before} to {self.after}"


def compare(name: str, before: Description, after: Description) -> Change | None:
    """The most telling difference between two descriptions of a parameter, or None."""
    for kind in ("shape", "device", "dtype", "strides"):
        old, new = getattr(before, kind), getattr(after, kind)
        if old != new:
            return Change(name, kind, str(old), str(new))
    if before.address != after.address:
        return Change(name, "storage", f"{before.address:#x}", f"{after.address:#x}")
    return None


class Guard:
    """What one plan assumes about tensors that others can change."""

    def __init__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        state: Mapping[Any, Any],
        bound: Sequence[Tensor],
    ) -> None:
        """Remember parameters and states by identity, and what is bound, parameters and states, by memory too."""
        self._params = list(params)
        self._absent = [grad is None for grad in grads]
        self._state = _state_values(state)
        self._bound = list(bound)
        self._addresses = list(map(Tensor.data_ptr, self._bound))
        self._same_metadata = metadata_check(self._described(grads))
        self.descriptions = {
            param: Description.of(param) for param, grad in zip(params, grads, strict=True) if grad is not None
        }

    def _described(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        return [*self._bound, *(grad for grad in grads if grad is not None)]

    def holds(self, params: Sequence[Tensor], grads: Sequence[Tensor | None], state: Mapping[Any, Any]) -> bool:
        """Whether nothing has changed that the plan depends on."""
        current_state = _state_values(state)
        return (
            len(params) == len(self._params)
            and all(map(is_, params, self._params))
            and [grad is None for grad in grads] == self._absent
            and len(current_state) == len(self._state)
            and all(map(is_, current_state, self._state))
            and list(map(Tensor.data_ptr, self._bound)) == self._addresses
            and self._same_metadata(self._described(grads))
        )


def metadata_check(tensors: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], bool]:
    """A function that tells whether a list of tensors has the metadata that ``tensors`` has now.

    Dynamo's own C++ check takes 0.06 µs a tensor. It is private, so :func:`plain_metadata_check` stands in for it where
    it is missing.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        check = TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],  # type: ignore[misc]
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],  # type: ignore[misc]
        ).check
    except (ImportError, TypeError):
        return plain_metadata_check(tensors)
    return lambda others: bool(check(*others))


def plain_metadata_check(tensors: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], bool]:
    """:func:`metadata_check` in plain Python."""
    expected = [_metadata(tensor) for tensor in tensors]
    return lambda others: [_metadata(tensor) for tensor in others] == expected


def _metadata(tensor: Tensor) -> tuple[object, ...]:
    strides = tensor.stride() if tensor.layout == torch.strided else None
    bits = (tensor.is_conj(), tensor.is_neg(), tensor.requires_grad)
    return type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.shape, strides, bits


def _state_values(state: Mapping[Any, Any]) -> list[Any]:
    return [value for values in state.values() if isinstance(values, dict) for value in values.values()]
