"""The optimizer's state as torch keeps it: per parameter a dict of tensors, with a ``step`` where the rule counts.

Parameters in lock-step share one ``step`` tensor. The count itself is kept exactly, on the host, by the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiled_optim import layout, shards

if TYPE_CHECKING:
    from compiled_optim.collect import Entry
    from compiled_optim.optimizer import Optimizer


def known(optimizer: Optimizer, entry: Entry, names: Sequence[str]) -> dict[str, Tensor]:
    """The state tensors this parameter already has; raises if one does not belong to it."""
    state = optimizer.own_state.get(entry.param, {})
    found = {name: state[name] for name in names if state.get(name) is not None}
    remedy = "load the checkpoint that belongs to this model, or delete the entry from optimizer.state to start afresh"
    for name, tensor in found.items():
        check_fit(entry.name, entry.param, name, tensor, remedy)
    return found


def check_fit(name: str, param: Tensor, state: str, tensor: Tensor, remedy: str) -> None:
    """Raise unless a state has its parameter's shape and kind, and is split over processes as that is."""
    here, there = shards.placed(param), shards.placed(tensor)
    if here != there:
        raise ValueError(
            f"state {state!r} of {name} is placed as {there or 'a plain tensor'}, but the parameter as "
            f"{here or 'a plain tensor'}; load the checkpoint by "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )
    if tensor.shape != param.shape or tensor.is_complex() != param.is_complex():
        raise ValueError(
            f"state {state!r} of {name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, but the parameter "
            f"has {tuple(param.shape)} and {param.dtype}; {remedy}"
        )


def steps_taken(optimizer: Optimizer, entry: Entry, names: Sequence[str]) -> int:
    """How often this parameter was stepped; for rules that do not count, 0 or 1 for never or before."""
    state = optimizer.own_state.get(entry.param, {})
    if optimizer.counts_steps:
        # an int in torch_npu's checkpoints, a tensor in torch's
        return int(state.get("step", 0))
    return int(bool(names) and all(state.get(name) is not None for name in names))


def bind(optimizer: Optimizer, entries: Sequence[Entry], names: Sequence[str], initial: Mapping[str, float]) -> Tensor:
    """Make sure each parameter has its states, laid out as it is, and return their common step counter."""
    steps = float(steps_taken(optimizer, entries[0], names))
    # as torch: float32 counts exactly to 2^24, a lower default dtype would not get far
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    counter = torch.tensor(steps, dtype=dtype, device="cpu")
    if not names and not optimizer.counts_steps:
        return counter
    for entry in entries:
        param, state = entry.local, optimizer.own_state[entry.param]
        if optimizer.counts_steps:
            state["step"] = counter
        for name in names:
            tensor = state.get(name)
            if tensor is None:
                state[name] = shards.like(entry.param, layout.full(param, initial[name], entry.rows))
            elif tensor.device != param.device or not layout.fits(param, shards.local(tensor), entry.rows):
                state[name] = shards.like(entry.param, layout.like(param, shards.local(tensor), entry.rows))
    return counter


def converted(state: Mapping[str, Any], old: torch.dtype, param: Tensor) -> dict[str, Any]:
    """A copy of a parameter's state on its new device, in its new dtype; what was kept in another dtype stays so.

    Strides are seen to by :func:`bind`.
    """
    return {
        name: value.to(param.device, param.dtype if value.dtype == old else value.dtype, copy=True)
        if name != "step" and isinstance(value, Tensor)
        else value
        for name, value in state.items()
    }


def unshared(state: object) -> object:
    """A parameter's state with a ``step`` tensor of its own."""
    if isinstance(state, dict) and isinstance(state.get("step"), Tensor):
        return {**state, "step": state["step"].clone()}
    return state
