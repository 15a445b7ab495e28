"""The guard: check before every step that the plan is still valid.

Units run without Dynamo's guards (see ``backends.inductor``), so only this check prevents a step from writing to freed
or stale memory. It compares the identity of parameters and states, their addresses, and the metadata of parameters and
gradients (dtype, device, shape, strides, layout, conj and neg bits), with C-level loops over whole lists. In-place
changes of values are allowed. The guard detects that something differs; ``tracker`` finds out what.

Access to a tensor from Python takes 0.06 µs, so the check is a large part of the host time of a step. States are not
checked until user code has accessed them; only step counts are compared in every step, by ``engine.rows``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor

from compiled_optim.backends.libraries import same_memory_check
from compiled_optim.engine.tensor_types import has_dtensor, local_shard
from compiled_optim.tensors import picker
from compiled_optim.torch_private import tensor_guards

MAX_PARTS = 256
"""The largest number of parts of the parameters for which a guard keeps a check."""


class Match(Enum):
    """The result of a check: whether a plan is valid for the current parameters and gradients."""

    NONE = "something differs"
    SOME = "valid, but some gradients are None"
    ALL = "valid, and no gradient is None"


class Guard:
    """The assumptions of one plan about tensors that user code can change.

    Args:
        params: all parameters.
        grads: their gradients.
        state: the state of the optimizer.
        bound_params: the parameters whose memory is watched.
        planned: the indices of the parameters that the plan steps. If a step may skip a parameter, because its
            gradient is None, with a tensor of which ``detach()`` looks like the gradient; with None otherwise.
        bound_states: the state tensors the plan is bound to.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        state: Mapping[Any, Any],
        bound_params: Sequence[Tensor],
        planned: Mapping[int, Tensor | None],
        bound_states: Sequence[Tensor],
    ) -> None:
        """Record the identity of parameters and states, and the addresses of the bound ones."""
        self.is_sharded = has_dtensor(bound_params)
        self._all_bound = len(bound_params) == len(params)
        self._params = list(params)
        self._places: dict[int, int] | None = None
        self._checks_of_some: dict[tuple[int, ...], Check] = {}
        self._bound_params = list(bound_params)
        bound = self._local_params()
        self._same_params = same_memory_check(bound)
        self._pick_planned = picker(list(planned))
        self._pick_others = picker([i for i in range(len(params)) if i not in planned])
        self._skippable = list(planned.values())
        # a gradient that is None now is expected to look like its parameter
        expected = [grads[i] if like is None or grads[i] is not None else like.detach() for i, like in planned.items()]
        self._check_metadata = metadata_check([*bound, *expected])
        self._stand_ins: list[Tensor | None] | None = None
        self._state = _state_values(state)
        self._bound_states = list(bound_states)
        self._state_addresses = list(map(Tensor.data_ptr, bound_states))

    def match(self, params: list[Tensor], grads: Sequence[Tensor | None]) -> Match:
        """Compare parameters and gradients with those of the plan, and the memory of the parameters."""
        bound = self._unmoved(params)
        if bound is None or not all(map(is_, self._pick_others(grads), repeat(None))):
            return Match.NONE
        planned = self._pick_planned(grads)
        if self._check_metadata([*bound, *planned]):
            return Match.ALL
        # compare a stand-in in the place of each gradient that is None
        if self._stand_ins is None:
            self._stand_ins = [None if like is None else like.detach() for like in self._skippable]
        filled = [stand_in if grad is None else grad for grad, stand_in in zip(planned, self._stand_ins, strict=True)]
        return Match.SOME if self._check_metadata([*bound, *filled]) else Match.NONE

    def match_some(self, params: list[Tensor], some: Iterable[Tensor]) -> tuple[Match, list[Tensor | None]]:
        """Compare as :meth:`match` does, for a step of some parameters; return the gradients, None for the others.

        Backward steps the same parameters together in every iteration, so the check of their metadata is kept. The
        metadata of the others is not compared.
        """
        grads: list[Tensor | None] = [None] * len(params)
        if self._unmoved(params) is None:
            return Match.NONE, grads
        if self._places is None:
            self._places = {id(param): i for i, param in enumerate(self._params)}
        places = self._places
        chosen = tuple([places[id(param)] for param in some if id(param) in places])
        tensors: list[Tensor | None] = []
        for i in chosen:
            grads[i] = params[i].grad
            tensors += (params[i], grads[i])
        check = self._checks_of_some.get(chosen)
        if check is not None:
            return Match.SOME if check(tensors) else Match.NONE, grads
        match = self.match(params, grads)
        if match is not Match.NONE and len(self._checks_of_some) < MAX_PARTS:
            self._checks_of_some[chosen] = metadata_check(tensors)
        return match, grads

    def state_holds(self, state: Mapping[Any, Any]) -> bool:
        """Return True if the states are the objects of the plan, in the same memory."""
        addresses = list(map(Tensor.data_ptr, self._bound_states))
        return addresses == self._state_addresses and same_objects(_state_values(state), self._state)

    def _unmoved(self, params: list[Tensor]) -> list[Tensor] | None:
        """Return the tensors whose memory is watched if they are those of the plan, in the same memory; else None."""
        if self._all_bound and not self.is_sharded:
            bound = params
        elif same_objects(params, self._params):
            bound = self._local_params()
        else:
            return None
        return bound if self._same_params(bound) else None

    def _local_params(self) -> list[Tensor]:
        """Return the bound parameters, or their local shards."""
        return list(map(local_shard, self._bound_params)) if self.is_sharded else self._bound_params


def same_objects(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return True if two sequences hold the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


Check = Callable[[Sequence[Tensor | None]], bool]


def metadata_check(tensors: Sequence[Tensor | None]) -> Check:
    """Return a function that compares the metadata of other tensors with that of ``tensors`` now. None matches None.

    It uses Dynamo's C++ check, which takes 0.06 µs per tensor. That check is private, so :func:`plain_metadata_check`
    replaces it where it is missing or wrong.
    """
    present = [i for i, tensor in enumerate(tensors) if tensor is not None]
    if not present:
        return lambda others: not any(other is not None for other in others)
    given = [tensor for tensor in tensors if tensor is not None]
    guards = tensor_guards()
    if guards is None:
        return plain_metadata_check(tensors)
    # None: no dimension is dynamic, so all sizes and strides are compared
    check = guards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    if len(given) == len(tensors):
        return lambda others: bool(check(*others))  # it compares types first, so it rejects None
    absent = [tensor is None for tensor in tensors]
    return lambda others: [o is None for o in others] == absent and bool(check(*[others[i] for i in present]))


def plain_metadata_check(tensors: Sequence[Tensor | None]) -> Check:
    """Return the same function as :func:`metadata_check`, in plain Python."""
    expected = [_metadata(tensor) for tensor in tensors]
    return lambda others: [_metadata(tensor) for tensor in others] == expected


def _metadata(tensor: Tensor | None) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    strides = tensor.stride() if tensor.layout == torch.strided else None
    bits = (tensor.is_conj(), tensor.is_neg(), tensor.requires_grad)
    return type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.shape, strides, bits


def _state_values(state: Mapping[Any, Any]) -> list[Any]:
    return [value for values in state.values() if isinstance(values, dict) for value in values.values()]
