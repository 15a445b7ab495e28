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
from compiled_optim.engine.storage_options import USUAL, Formats
from compiled_optim.engine.stored_states import (
    COMPANIONS,
    MASTER,
    SCALE,
    dequantize,
    is_quantized,
    quantize,
    rows_of_scales,
)
from compiled_optim.engine.tensor_types import local_shard
from compiled_optim.modes import outside_of_modes
from compiled_optim.quantization import BLOCK
from compiled_optim.storage import Quantized, compute_dtype
from compiled_optim.update_program import EMA, UpdateProgram, reduced_shape

State = dict[Tensor, Any]
"""``optimizer.state``: for each parameter a dict of its states by name."""


def kept_dtypes(
    rule: Rule,
    values: Mapping[str, Any],
    param: Tensor,
    names: Sequence[str],
    formats: Formats,
    parameter_name: Callable[[], str],
) -> tuple[tuple[torch.dtype, ...], int]:
    """Return the dtypes of a parameter's states and its number of steps; raise if one does not match the parameter.

    A state that does not exist yet, or that ``formats`` names, will have the dtype of :func:`new_state_dtype`.
    """
    check_companions_fit(parameter_name, param, values, names, REMEDY)
    dtypes = []
    for name in names:
        tensor = values.get(name)
        if tensor is None:
            dtypes.append(new_state_dtype(name, param.dtype, formats))
            continue
        check_state_fits(parameter_name, param, name, tensor, REMEDY, rule.reduced_dims(name))
        if is_quantized(values, name):
            check_codes_fit(parameter_name, values, name, REMEDY)
            kept = formats.of(name)
            dtypes.append(compute_dtype(param.dtype) if kept is None else new_state_dtype(name, param.dtype, formats))
            continue
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(
                f"state {name!r} of {parameter_name()} has dtype {tensor.dtype}, which would truncate every update; "
                f"convert it to {param.dtype}"
            )
        is_chosen = formats.of(name) is not None
        dtypes.append(new_state_dtype(name, param.dtype, formats) if is_chosen else tensor.dtype)
    counts_steps = rule.counts_steps and ("step" in values or type(rule).counts_steps)
    return tuple(dtypes), steps_taken(parameter_name, values, counts_steps, names)


def new_state_dtype(name: str, dtype: torch.dtype, formats: Formats = USUAL) -> torch.dtype:
    """Return the dtype of a new state of a parameter in ``dtype``.

    It is the dtype that ``formats`` names, or that of the parameter; for an average of the weights at least float32.
    In a lower precision an average would not move: what it adds in a step is less than half of its last bit.
    """
    kept = formats.of(name)
    if kept is not None:
        return kept if isinstance(kept, torch.dtype) else torch.uint8
    return dtype if name != EMA or dtype.is_complex else compute_dtype(dtype)


def check_state_fits(
    parameter_name: Callable[[], str], param: Tensor, name: str, tensor: Tensor, remedy: str, ones: Sequence[int] = ()
) -> None:
    """Raise if a state differs from its parameter in shape, in placement or in being complex.

    ``ones`` are the dimensions in which it has the size 1, and is replicated.
    """
    shape, expected, found = reduced_shape(param.shape, *ones), placement(param, ones), placement(tensor)
    if expected != found:
        owner = "it needs" if ones else "the parameter has"
        raise ValueError(
            f"state {name!r} of {parameter_name()} has placement {found or 'none'}, but {owner} "
            f"{expected or 'none'}; load the checkpoint with "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )
    expects = f", and the state of it has {shape}" if ones else ""
    if tuple(tensor.shape) != shape or tensor.is_complex() != param.is_complex():
        raise ValueError(
            f"state {name!r} of {parameter_name()} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, but the "
            f"parameter has {tuple(param.shape)} and {param.dtype}{expects}; {remedy}"
        )


def check_codes_fit(parameter_name: Callable[[], str], values: Mapping[str, Any], name: str, remedy: str) -> None:
    """Raise if the scales of a state in 8 bits are not those of its codes. Compiled code would read beyond them."""
    codes, scales = local_shard(values[name]), values.get(name + SCALE)
    if rows_of_scales(codes, scales, 0) is None:
        found = type(scales).__name__
        if isinstance(scales, Tensor):
            found = f"{scales.dtype} of shape {tuple(scales.shape)}"
        raise ValueError(
            f"state {name!r} of {parameter_name()} is kept in 8 bits, but {name + SCALE!r} is {found}, and not "
            f"{torch.float32} with a number for each {BLOCK} elements or for each row; {remedy}"
        )


def check_companions_fit(
    parameter_name: Callable[[], str], param: Tensor, values: Mapping[str, Any], names: Collection[str], remedy: str
) -> None:
    """Raise if master weights or compensations do not fit their parameter. ``names`` are the states of the rule."""
    for name in COMPANIONS:
        value = values.get(name)
        if name in names or value is None:
            continue
        if not isinstance(value, Tensor) or not value.is_floating_point():
            kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{name!r} of {parameter_name()} is {kind}, not a tensor of floats; {remedy}")
        check_state_fits(parameter_name, param, name, value, remedy)


def steps_taken(
    parameter_name: Callable[[], str], values: Mapping[str, Any], counts_steps: bool, names: Sequence[str]
) -> int:
    """Return the number of steps of a parameter from its states; 0 or 1 for rules that do not count steps."""
    if not counts_steps:
        # an average may be newer than the other states: it is missing if ema_decay was added later
        own = [name for name in names if name != EMA] or names
        return int(bool(own) and all(values.get(name) is not None for name in own))
    step = values.get("step", 0)
    count = step_count(step)
    if count is None:
        raise ValueError(f"'step' of {parameter_name()} is {step!r}, not a number of steps; {REMEDY}")
    return count


def materialize_states(
    values: dict[str, Any],
    param: Tensor,
    local: Tensor,
    initial: Mapping[str, float | None],
    rows: int,
    program: UpdateProgram,
    dtypes: Sequence[torch.dtype],
    nonnegative: Collection[str],
) -> list[Tensor]:
    """Create what a program keeps for a parameter and what it lacks, convert the rest, and return the local tensors.

    Args:
        values: the states of the parameter by name.
        param: the parameter.
        local: what this process holds of it.
        initial: the initial values of the states, None for a copy of the parameter. Master weights start as copies too.
        rows: the number of dimensions, after the first, in which the program sees it.
        program: the program, which tells the storages.
        dtypes: the dtypes of the lists of the program after the parameters.
        nonnegative: the names of states without a sign.
    """
    is_sharded = local is not param
    reduced = {program.kept[number - 2]: dim for number, dim in program.reduced}
    storages = dict(zip(program.states, program.storages[1:], strict=True))
    found: dict[str, Tensor] = {}
    for name, dtype in zip(program.kept, dtypes, strict=True):
        tensor, storage = values.get(name), storages.get(name)
        held = local_shard(tensor) if is_sharded and tensor is not None else tensor
        if name in found:  # scales, which were made with the codes
            made = found[name]
        elif isinstance(storage, Quantized):
            made, found[name + SCALE] = _codes(values, name, local, initial, rows, nonnegative)
        elif name in reduced:
            shape = program.list_shape(2 + program.kept.index(name), local.shape)
            made = _reduced(held, shape, initial.get(name) or 0.0, dtype, local.device)
        else:
            source = source_of(values, name, local, initial, rows, nonnegative)
            if not isinstance(source, Tensor):
                made = layout.full_like(local, source, rows, dtype)
            elif (
                source is held
                and held.device == local.device
                and held.dtype == dtype
                and layout.pairs_with(local, held, rows)
            ):
                made = held
            else:
                made = layout.copy_like(local, source, rows, dtype)
        found[name] = made
        if made is not held:
            ones = (reduced[name],) if name in reduced else ()
            values[name] = shard_like(param, made, ones) if is_sharded and not name.endswith(SCALE) else made
    drop_other_companions(values, found)
    return [found[name] for name in program.kept]


def source_of(
    values: Mapping[str, Any],
    name: str,
    local: Tensor,
    initial: Mapping[str, float | None],
    rows: int,
    nonnegative: Collection[str],
) -> Tensor | float:
    """Return what a state gets its values from: what is kept now, decoded if that is codes, or how a state starts.

    Args:
        values: the states of the parameter by name.
        name: the name of the state, or of a companion of the parameter.
        local: what this process holds of the parameter.
        initial: the initial values of the states, None for a copy of the parameter. Master weights start as copies too.
        rows: the number of dimensions, after the first, in which the program sees the parameter.
        nonnegative: the names of states without a sign.
    """
    if values.get(name) is None:
        value = initial.get(name, None if name == MASTER else 0.0)
        return local.detach() if value is None else value
    held = local_shard(values[name])
    return dequantize(held, values[name + SCALE], name not in nonnegative, rows) if is_quantized(values, name) else held


def drop_other_companions(values: dict[str, Any], kept: Collection[str]) -> None:
    """Delete the companions of storages that a parameter no longer has. ``kept`` are the names of what it keeps now."""
    for name in [name for name in values if name in COMPANIONS or name.removesuffix(SCALE) in kept]:
        if name not in kept:
            del values[name]


def _reduced(
    held: Tensor | None, shape: Sequence[int], initial: float, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a state that has the size 1 in one dimension: contiguous, in this dtype and on this device."""
    if held is None:
        return torch.full(tuple(shape), initial, dtype=dtype, device=device)
    return held.to(device, dtype).contiguous()


def _codes(
    values: Mapping[str, Any],
    name: str,
    local: Tensor,
    initial: Mapping[str, float | None],
    rows: int,
    nonnegative: Collection[str],
) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of a state, converted from whatever it is kept in now."""
    if is_quantized(values, name):
        held, scales = local_shard(values[name]), values[name + SCALE]
        is_usable = rows_of_scales(held, scales, rows) == rows and layout.pairs_with(local, held, rows)
        if is_usable and held.device == local.device == scales.device:
            return held, scales
    source = source_of(values, name, local, initial, rows, nonnegative)
    if not isinstance(source, Tensor):
        source = layout.full_like(local, source, rows, torch.float32)
    return quantize(local, source.to(local.device), name not in nonnegative, rows)


def convert_states(
    values: Mapping[str, Any], old: torch.dtype, param: Tensor, numbers: Collection[str]
) -> dict[str, Any]:
    """Return a copy of a parameter's states on its new device. Those with the names ``numbers`` stay as they are.

    States in the old dtype of the parameter get the new one; others keep theirs. :func:`materialize_states` sets the
    strides.
    """
    return {
        name: value.to(
            param.device,
            new_state_dtype(name, param.dtype) if value.dtype == old and not name.endswith(SCALE) else value.dtype,
            copy=True,
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
