"""The state in torch's format: for each parameter a dict of tensors. ``numbers`` has those with one element."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from compiled_optim.engine import layout
from compiled_optim.engine.flat_layout import is_flat
from compiled_optim.engine.numbers import REMEDY, step_count
from compiled_optim.engine.rule import Rule
from compiled_optim.engine.sharding import placement, shard_like
from compiled_optim.engine.tensor_types import local_shard
from compiled_optim.modes import outside_of_modes
from compiled_optim.program import EMA
from compiled_optim.storage import compute_dtype

State = dict[Tensor, Any]
"""``optimizer.state``: for each parameter a dict of its states by name."""


def kept_dtypes(
    rule: Rule, values: Mapping[str, Any], param: Tensor, names: Sequence[str], parameter_name: Callable[[], str]
) -> tuple[tuple[torch.dtype, ...], int]:
    """Return the dtypes of a parameter's states and its number of steps; raise if one does not match the parameter.

    A state that does not exist yet will have the dtype of :func:`new_state_dtype`.
    """
    dtypes = []
    for name in names:
        tensor = values.get(name)
        if tensor is None:
            dtypes.append(new_state_dtype(name, param.dtype))
            continue
        check_state_fits(parameter_name, param, name, tensor, REMEDY)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(
                f"state {name!r} of {parameter_name()} has dtype {tensor.dtype}, which would truncate every update; "
                f"convert it to {param.dtype}"
            )
        dtypes.append(tensor.dtype)
    return tuple(dtypes), steps_taken(parameter_name, values, rule.counts_steps, names)


def new_state_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a new state: that of the parameter, but at least float32 for an average of the weights.

    In a lower precision an average would not move: what it adds in a step is less than half of its last bit.
    """
    return dtype if name != EMA or dtype.is_complex else compute_dtype(dtype)


def check_state_fits(parameter_name: Callable[[], str], param: Tensor, name: str, tensor: Tensor, remedy: str) -> None:
    """Raise if a state and its parameter differ in shape or placement, or only one of them is complex."""
    expected, found = placement(param), placement(tensor)
    if expected != found:
        raise ValueError(
            f"state {name!r} of {parameter_name()} has placement {found or 'none'}, but the parameter has "
            f"{expected or 'none'}; load the checkpoint with "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )
    if tensor.shape != param.shape or tensor.is_complex() != param.is_complex():
        raise ValueError(
            f"state {name!r} of {parameter_name()} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, but the "
            f"parameter has {tuple(param.shape)} and {param.dtype}; {remedy}"
        )


def steps_taken(
    parameter_name: Callable[[], str], values: Mapping[str, Any], counts_steps: bool, names: Sequence[str]
) -> int:
    """Return the number of steps of a parameter from its states; 0 or 1 for rules that do not count steps."""
    if not counts_steps:
        return int(bool(names) and all(values.get(name) is not None for name in names))
    step = values.get("step", 0)
    count = step_count(step)
    if count is None:
        raise ValueError(f"'step' of {parameter_name()} is {step!r}, not a number of steps; {REMEDY}")
    return count


def materialize_states(
    values: dict[str, Any], param: Tensor, local: Tensor, initial: Mapping[str, float], rows: bool
) -> list[Tensor]:
    """Create the states a parameter lacks, give the others its working layout, and return what this process holds.

    ``local`` is what this process holds of the parameter. An average starts as a copy of it.
    """
    is_sharded = local is not param
    found = []
    for name, value in initial.items():
        tensor = values.get(name)
        held = local_shard(tensor) if is_sharded and tensor is not None else tensor
        if held is None and name == EMA:
            made = layout.copy_like(local, local.detach(), rows, new_state_dtype(name, local.dtype))
        elif held is None:
            made = layout.full_like(local, value, rows)
        elif held.device != local.device or not layout.pairs_with(local, held, rows):
            made = layout.copy_like(local, held, rows)
        else:
            made = held
        if made is not held:
            values[name] = shard_like(param, made) if is_sharded else made
        found.append(made)
    return found


def convert_states(
    values: Mapping[str, Any], old: torch.dtype, param: Tensor, numbers: Collection[str]
) -> dict[str, Any]:
    """Return a copy of a parameter's states on its new device. Those with the names ``numbers`` stay as they are.

    States in the old dtype of the parameter get the new one; others keep theirs. :func:`materialize_states` sets the
    strides.
    """
    return {
        name: value.to(
            param.device, new_state_dtype(name, param.dtype) if value.dtype == old else value.dtype, copy=True
        )
        if name not in numbers and isinstance(value, Tensor)
        else value
        for name, value in values.items()
    }


StateT = TypeVar("StateT", bound=dict[Any, Any])


def with_own_memory(state: StateT, numbers: Collection[str]) -> StateT:
    """Return a copy of a state in which no tensor is a part of a longer one that belongs to this package.

    Such parts are the tensors with the names ``numbers``, and those that lie in flat buffers.
    """
    copied = copy.copy(state)
    for key, values in state.items():
        if isinstance(values, dict):
            copied[key] = copy_parts(values, numbers)
    return copied


def copy_parts(values: Mapping[str, Any], numbers: Collection[str]) -> dict[str, Any]:
    """Return the states of one parameter for :func:`with_own_memory`."""
    with outside_of_modes():
        return {
            name: value.clone() if isinstance(value, Tensor) and (name in numbers or is_flat(value)) else value
            for name, value in values.items()
        }
