"""The state in torch's format: for each parameter a dict of tensors. ``numbers`` has those with one element."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.engine import layout
from compiled_optim.engine.numbers import REMEDY, step_count
from compiled_optim.engine.rule import Rule
from compiled_optim.engine.sharding import placement, shard_like
from compiled_optim.engine.tensor_types import local_shard

State = dict[Tensor, Any]
"""``optimizer.state``: for each parameter a dict of its states by name."""


def kept_dtypes(
    rule: Rule, values: Mapping[str, Any], param: Tensor, names: Sequence[str], parameter_name: Callable[[], str]
) -> tuple[tuple[torch.dtype, ...], int]:
    """Return the dtypes of a parameter's states and its number of steps; raise if one does not match the parameter.

    A state that does not exist yet will have the dtype of the parameter.
    """
    dtypes = []
    for name in names:
        tensor = values.get(name)
        if tensor is None:
            dtypes.append(param.dtype)
            continue
        check_state_fits(parameter_name, param, name, tensor, REMEDY)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(
                f"state {name!r} of {parameter_name()} has dtype {tensor.dtype}, which would truncate every update; "
                f"convert it to {param.dtype}"
            )
        dtypes.append(tensor.dtype)
    return tuple(dtypes), steps_taken(parameter_name, values, rule.counts_steps, names)


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

    ``local`` is what this process holds of the parameter.
    """
    is_sharded = local is not param
    found = []
    for name, value in initial.items():
        tensor = values.get(name)
        held = local_shard(tensor) if is_sharded and tensor is not None else tensor
        if held is None:
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
        name: value.to(param.device, param.dtype if value.dtype == old else value.dtype, copy=True)
        if name not in numbers and isinstance(value, Tensor)
        else value
        for name, value in values.items()
    }
