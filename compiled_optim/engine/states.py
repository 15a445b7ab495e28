"""The state in torch's format: for each parameter a dict of tensors, with a ``step`` if the rule counts steps.

Parameters that are stepped together share one ``step`` tensor. The exact count is kept on the host.
"""

from __future__ import annotations

import math
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
    """Return the state tensors a parameter already has; raise if one does not match the parameter."""
    values = state.get(param, {})
    found = {name: values[name] for name in names if values.get(name) is not None}
    for name, tensor in found.items():
        check_state_fits(parameter_name, param, name, tensor, REMEDY)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(
                f"state {name!r} of {parameter_name} has dtype {tensor.dtype}, which would truncate every update; "
                f"convert it to {param.dtype}"
            )
    return found


def check_state_fits(parameter_name: str, param: Tensor, name: str, tensor: Tensor, remedy: str) -> None:
    """Raise if a state and its parameter differ in shape or placement, or only one of them is complex."""
    expected, found = placement(param), placement(tensor)
    if expected != found:
        raise ValueError(
            f"state {name!r} of {parameter_name} has placement {found or 'none'}, but the parameter has "
            f"{expected or 'none'}; load the checkpoint with "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )
    if tensor.shape != param.shape or tensor.is_complex() != param.is_complex():
        raise ValueError(
            f"state {name!r} of {parameter_name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, but the "
            f"parameter has {tuple(param.shape)} and {param.dtype}; {remedy}"
        )


def steps_taken(parameter_name: str, values: Mapping[str, Any], counts_steps: bool, names: Sequence[str]) -> int:
    """Return the number of steps of a parameter from its states; 0 or 1 for rules that do not count steps."""
    if not counts_steps:
        return int(bool(names) and all(values.get(name) is not None for name in names))
    step = values.get("step", 0)
    if not is_step_count(step):
        raise ValueError(f"'step' of {parameter_name} is {step!r}, not a number of steps; {REMEDY}")
    return int(step)


def is_step_count(step: object) -> bool:
    """Return True for a number of steps: a tensor in checkpoints of torch, an int in those of torch_npu."""
    if isinstance(step, Tensor):
        step = step.item() if step.numel() == 1 else None
    return isinstance(step, int | float) and math.isfinite(step) and step >= 0 and step == int(step)


def new_step_counter(steps: int) -> Tensor:
    """Return a ``step`` tensor like that of torch.optim."""
    # not the default dtype if it is lower: float32 counts exactly to 2^24, bfloat16 to 256
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
            made = layout.full_like(local, value, rows)
        elif held.device != local.device or not layout.pairs_with(local, held, rows):
            made = layout.copy_like(local, held, rows)
        else:
            made = held
        if made is not held:
            values[name] = shard_like(param, made) if is_sharded else made
        found.append(made)
    return found


def convert_states(values: Mapping[str, Any], old: torch.dtype, param: Tensor) -> dict[str, Any]:
    """Return a copy of a parameter's states on its new device.

    States in the old dtype of the parameter get the new one; others keep theirs. :func:`materialize_states` sets the
    strides.
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
