"""The optimizer's state as torch keeps it: for each parameter a dict of tensors, with a ``step`` where the rule counts.

Parameters that are stepped together share one ``step`` tensor. The exact count is kept on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.engine import layout
from compiled_optim.engine.sharding import local_shard, placement, shard_like

State = dict[Tensor, Any]
"""``optimizer.state``: for each parameter a dict of its states by name."""

REMEDY = "load the checkpoint that belongs to this model, or delete the entry from optimizer.state to start fresh"


def existing_states(state: State, param: Tensor, parameter_name: str, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the state tensors a parameter already has; raise if one does not belong to it."""
    values = state.get(param, {})
    found = {name: values[name] for name in names if values.get(name) is not None}
    for name, tensor in found.items():
        check_state_fits(parameter_name, param, name, tensor, REMEDY)
    return found


def check_state_fits(parameter_name: str, param: Tensor, name: str, tensor: Tensor, remedy: str) -> None:
    """Raise unless a state has its parameter's shape and kind, and is sharded as the parameter is."""
    expected, found = placement(param), placement(tensor)
    if expected != found:
        raise ValueError(
            f"state {name!r} of {parameter_name} is placed as {found or 'a plain tensor'}, but the parameter as "
            f"{expected or 'a plain tensor'}; load the checkpoint by "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )
    if tensor.shape != param.shape or tensor.is_complex() != param.is_complex():
        raise ValueError(
            f"state {name!r} of {parameter_name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, but the "
            f"parameter has {tuple(param.shape)} and {param.dtype}; {remedy}"
        )


def steps_taken(values: Mapping[str, Any], counts_steps: bool, names: Sequence[str]) -> int:
    """Return how often a parameter was stepped, from its states; 0 or 1 for rules that do not count."""
    if counts_steps:
        # an int in torch_npu's checkpoints, a tensor in torch's
        return int(values.get("step", 0))
    return int(bool(names) and all(values.get(name) is not None for name in names))


def new_step_counter(steps: int) -> Tensor:
    """Return a ``step`` tensor as torch makes it."""
    # float32 counts exactly to 2^24; a lower default dtype would not get far
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    return torch.tensor(float(steps), dtype=dtype, device="cpu")


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
            held = layout.full_like(local, value, rows)
        elif held.device != local.device or not layout.pairs_with(local, held, rows):
            held = layout.copy_like(local, held, rows)
        else:
            found.append(held)
            continue
        values[name] = shard_like(param, held) if is_sharded else held
        found.append(held)
    return found


def convert_states(values: Mapping[str, Any], old: torch.dtype, param: Tensor) -> dict[str, Any]:
    """Return a copy of a parameter's states on its new device, in its new dtype; another dtype of their own stays.

    :func:`materialize_states` sets the strides.
    """
    return {
        name: value.to(param.device, param.dtype if value.dtype == old else value.dtype, copy=True)
        if name != "step" and isinstance(value, Tensor)
        else value
        for name, value in values.items()
    }


def with_own_step(values: object) -> object:
    """Return a parameter's states with a ``step`` tensor that no other parameter shares."""
    if isinstance(values, dict) and isinstance(values.get("step"), Tensor):
        return {**values, "step": values["step"].clone()}
    return values
