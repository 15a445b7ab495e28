"""The state in torch's format: for each parameter a dict of tensors, with a ``step`` if the rule counts steps.

The ``step`` tensors of parameters that are stepped together are elements of one tensor. The exact counts are kept
beside them.
"""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from operator import add
from typing import Any, TypeVar

import torch
from torch import Tensor

from compiled_optim.engine import layout
from compiled_optim.engine.rule import Rule
from compiled_optim.engine.sharding import placement, shard_like
from compiled_optim.engine.tensor_types import is_fake, local_shard
from compiled_optim.modes import outside_of_modes

State = dict[Tensor, Any]
"""``optimizer.state``: for each parameter a dict of its states by name."""

REMEDY = "load the checkpoint that belongs to this model, or delete the entry from optimizer.state to start fresh"


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


def step_count(step: object) -> int | None:
    """Return a number of steps, which is a tensor in torch and an int in torch_npu; None if it is no such number."""
    if isinstance(step, Tensor):
        with outside_of_modes():
            step = step.item() if step.numel() == 1 and not is_fake(step) else None
    if isinstance(step, int | float) and math.isfinite(step) and step >= 0 and step == int(step):
        return int(step)
    return None


class StepCounters:
    """The step counts of the parameters of a bucket: exact integers, and the ``step`` tensors of the state.

    ``tensors`` are the elements of one tensor, so user code that changes one of them by any means is detected by
    comparing the memory. Counts stop at ``limit``.
    """

    def __init__(self, counts: Sequence[int], limit: int | None) -> None:
        # not the default dtype if it is lower: float32 counts exactly to 2^24, bfloat16 to 256
        double = torch.get_default_dtype() == torch.float64
        self.counts = array("q", counts)
        self.are_equal = len(set(counts)) <= 1
        self._limit = limit
        self._public: array[Any] = array("d" if double else "f", counts)
        with outside_of_modes():
            self.tensors = torch.frombuffer(self._public, dtype=torch.float64 if double else torch.float32).unbind()
        self._written = self._public.tobytes()

    def are_unchanged(self) -> bool:
        """Return True if only this object has written to the ``step`` tensors."""
        return self._public.tobytes() == self._written

    def after(self, present: Sequence[bool] | None) -> array[int]:
        """Return the counts after a step of the parameters that are ``present``; None means all."""
        if present is None and self.are_equal:
            count = self.counts[0] + 1
            return array("q", [count if self._limit is None else min(count, self._limit)]) * len(self.counts)
        counts = map(add, self.counts, repeat(1) if present is None else present)
        return array("q", counts if self._limit is None else map(min, counts, repeat(self._limit)))

    def set(self, counts: array[int], are_equal: bool) -> None:
        """Write counts. After an interrupt, the same call can be repeated."""
        typecode = self._public.typecode
        self.counts, self.are_equal = counts, are_equal
        self._public[:] = array(typecode, [counts[0]]) * len(counts) if are_equal else array(typecode, counts)
        self._written = self._public.tobytes()


def place_step(values: dict[str, Any], step: Tensor, taken: set[int]) -> Tensor:
    """Make ``step`` the step count of a parameter, and return the tensor in its state.

    A tensor that is there already stays the same object: it is pointed to the memory of ``step``. ``taken`` are the ids
    of the tensors of other parameters.
    """
    existing = values.get("step")
    if (
        isinstance(existing, Tensor)
        and existing.device == step.device
        and existing.ndim == 0
        and not existing.requires_grad
        and id(existing) not in taken
    ):
        existing.data = step
        step = existing
    values["step"] = step
    taken.add(id(step))
    return step


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


StateT = TypeVar("StateT", bound=dict[Any, Any])


def with_own_steps(state: StateT) -> StateT:
    """Return a copy of a state in which each ``step`` tensor has its own memory."""
    copied = copy.copy(state)
    for key, values in state.items():
        if isinstance(values, dict) and isinstance(values.get("step"), Tensor):
            with outside_of_modes():
                copied[key] = {**values, "step": values["step"].clone()}
    return copied
