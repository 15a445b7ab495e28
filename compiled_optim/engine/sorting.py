"""Sort parameters into buckets that are stepped together; raise before any change if one cannot be stepped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from compiled_optim.backends import Backend
from compiled_optim.engine import flat_layout, layout, states
from compiled_optim.engine.buckets import Bucket, Entry
from compiled_optim.engine.matrix_map import MatrixCut
from compiled_optim.engine.numbers import kept_numbers
from compiled_optim.engine.overlaps import overlap_waves
from compiled_optim.engine.rule import Group, Rule
from compiled_optim.engine.sharding import ShardSpec, Splits, check_supported, matrix_splits, shard_sizes
from compiled_optim.engine.storage_options import EIGHT_BIT, KEYS, USUAL, companion_dtypes, formats_for, with_storages
from compiled_optim.engine.tensor_types import PLAIN_TYPES, has_dtensor, is_wrapper, local_shard
from compiled_optim.flat_programs import works_flat
from compiled_optim.program_checks import split_means
from compiled_optim.update_program import MEAN_OVER, takes

MATRIX_ELEMENTS = 1 << 26
"""The largest number of elements in a bucket of a rule that maps matrices: it keeps a copy of them."""

Names = Callable[[], Sequence[str]]
"""Returns the names of all parameters, for messages."""


def make_buckets(
    rule: Rule,
    groups: Sequence[Group],
    state: states.State,
    grads: Sequence[Tensor | None],
    names: Names,
    backend_for: Callable[[torch.device], tuple[Backend, bool]],
    unscales: bool = False,
    stepped: Collection[int] = (),
) -> list[Bucket]:
    """Sort the parameters that have a gradient into buckets; raise if one cannot be stepped. Nothing is changed.

    A backend that takes rows also gets parameters without a gradient that were stepped before. Buckets are in the order
    in which they have to be stepped.

    Args:
        rule: the rule of the optimizer.
        groups: its parameter groups.
        state: its state.
        grads: the local shards of the gradients, None for a parameter without one.
        names: returns the names of the parameters.
        backend_for: returns the backend for a device, and whether it gets flat buffers. A parameter that does not fit
            into one is stepped where it is.
        unscales: make programs that unscale gradients in place.
        stepped: the ids of parameters that were stepped before, for rules that keep no state.
    """
    numbered = [(number, param) for number, group in enumerate(groups) for param in group["params"]]
    is_sharded = has_dtensor([param for _, param in numbered])
    rules = [rule.for_group(group) for group in groups]
    programs = {
        (i, rank): own.program(group, unscales, rank)
        for i, (own, group) in enumerate(zip(rules, groups, strict=True))
        for rank in ((1, 3) if own.matrices else (1,))
    }
    maps = [own.matrix_map(group) for own, group in zip(rules, groups, strict=True)]
    places = {program: place for place, program in enumerate(programs.values())}  # a number is compared faster
    kinds = {key: places[program] for key, program in programs.items()}
    stored = [any(key in group for key in KEYS) for group in groups]
    keeps_state = any(own.counts_steps for own in rules) or any(program.states for program in programs.values())
    backends: dict[torch.device, Backend] = {}
    flat: dict[torch.device, bool] = {}
    entries, dtypes, formats, seen = [], [], [], set()
    for index, (number, param) in enumerate(numbered):
        rule = rules[number]
        grad, values = grads[index], state.get(param)
        rank = rule.view_rank(param)
        program = programs[number, rank if rule.matrices else 1]
        # torch warns about a parameter listed twice; it is stepped once
        if id(param) in seen or (grad is None and not values and (keeps_state or id(param) not in stepped)):
            continue
        local = local_shard(param) if is_sharded else param
        device, dtype = local.device, param.dtype
        if device not in backends:
            backends[device], flat[device] = backend_for(device)
        if grad is None:
            if not backends[device].takes_rows or not layout.is_steppable(local):
                continue
            grad_dtype = dtype
        else:
            if type(param) not in PLAIN_TYPES:
                check_supported(type(rule).__name__, names()[index], param, program, rank)
            check_can_step(rule, names, index, local, grad)
            grad_dtype = dtype if grad.dtype == dtype else layout.grad_dtype(local, grad)
        seen.add(id(param))
        own_states = program.states
        own_formats = USUAL
        if stored[number]:
            sizes, whole_blocks = shard_sizes(param), backends[device].whole_blocks
            own_formats = formats_for(
                groups[number], own_states, dtype, sizes, rule.nonnegative, whole_blocks, rule.unquantized
            )
        kept, steps = tuple(states.new_state_dtype(name, dtype, own_formats) for name in own_states), 0
        if values:
            kept, steps = states.kept_dtypes(rule, values, param, own_states, own_formats, partial(_name, names, index))
        own_numbers: tuple[float, ...] = ()
        if rule.numbers:
            own_numbers = kept_numbers(rule, groups[number], values or {}, partial(_name, names, index))
        own = (grad_dtype, dtype, *kept, *companion_dtypes(own_formats, own_states, dtype))
        formats.append(own_formats)
        dtypes.append(tuple(map(layout.real_dtype, own)) if dtype.is_complex else own)
        entry = Entry(index, number, param, local, grad_dtype, rank - 1, steps, own_numbers)
        if maps[number] is not None:
            entry.cut = _matrix_cut(rule, groups[number], param, partial(_name, names, index))
            entry.constants = rule.constants(groups[number], param.shape)
        entries.append(entry)

    buckets: dict[tuple[object, ...], Bucket] = {}
    last: tuple[object, ...] | None = None
    waves = overlap_waves([entry.local for entry in entries])
    mapped: dict[tuple[object, ...], int] = {}  # elements of matrices, by the key without the number of the bucket
    for i, (entry, own) in enumerate(zip(entries, dtypes, strict=True)):
        device, number, wave = entry.local.device, entry.group, waves.get(i, 0)
        rule = rules[number]
        kind = (number, 1 + entry.rows if rule.matrices else 1)
        shards = ShardSpec.from_tensor(entry.param) if is_sharded else None
        row = () if backends[device].takes_rows else (number, entry.steps, entry.numbers, entry.constants)
        is_flat = (
            flat[device]
            and shards is None
            and not rule.sums_over_all
            and entry.cut is None
            and i not in waves
            and flat_layout.fits(entry.param, entry.rows)
            and works_flat(programs[kind], 1 + entry.rows)
            and EIGHT_BIT not in dict(formats[i].states).values()
        )
        width = layout.view_shape(entry.local, True)[1] if is_flat and entry.rows else None
        key: tuple[object, ...]
        splits: Splits = ()
        if shards is not None and entry.rows > 1 and takes(programs[kind].update, MEAN_OVER):
            splits = matrix_splits(entry.param)
        key = (
            kinds[kind],
            device,
            own,
            wave,
            entry.rows,
            shards,
            row,
            is_flat,
            width,
            formats[i],
            maps[number],
            splits,
        )
        if entry.cut is not None:  # the size of the whole parameter: all ranks have to make the same buckets
            before = mapped.get(key, 0)
            mapped[key] = before + entry.param.numel()
            key = (*key, before // MATRIX_ELEMENTS)
        if key != last:  # comparing is faster than hashing
            last = key
            if key not in buckets:
                program = with_storages(programs[kind], own[1:], formats[i], rule.nonnegative, entry.rows > 0)
                if splits:
                    program = replace(program, split=tuple(dim for dim, _ in splits))
                    program = replace(program, means=split_means(program, 1 + entry.rows))
                bucket = Bucket(rule, groups, backends[device], program, own, entry.rows, wave, shards, is_flat)
                bucket.splits = splits
                bucket.is_outside = flat[device] and not is_flat
                bucket.sums_over_all = rule.sums_over_all
                bucket.matrix_map = maps[number]
                buckets[key] = bucket
            bucket = buckets[key]
        bucket.entries.append(entry)
    # parameters that share memory are stepped in the order of their waves
    return sorted(buckets.values(), key=lambda bucket: bucket.wave)


def _name(names: Names, index: int) -> str:
    return names()[index]


def _matrix_cut(rule: Rule, group: Group, param: Tensor, name: Callable[[], str]) -> MatrixCut:
    """Return how a parameter is cut into matrices; raise ValueError with its name if it cannot be."""
    try:
        return rule.matrix_cut(group, param.shape)
    except ValueError as error:
        raise ValueError(f"{error}; it is {name()}") from None


def check_can_step(rule: Rule, names: Names, index: int, param: Tensor, grad: Tensor) -> None:
    """Raise if this parameter cannot be stepped with this gradient."""
    if (
        grad.layout == param.layout == torch.strided
        and grad.shape == param.shape
        and grad.device == param.device
        and (grad.dtype == param.dtype or grad.is_complex() <= param.is_complex())
        and layout.is_steppable(param)
        and (type(grad) in PLAIN_TYPES or not is_wrapper(grad))
        and (rule.takes_complex or not param.is_complex())
    ):
        return
    name, optimizer = names()[index], type(rule).__name__
    if param.is_complex() and not rule.takes_complex:
        raise RuntimeError(f"{optimizer} does not support complex parameters, but {name} has dtype {param.dtype}")
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"{optimizer} does not support sparse gradients, please consider {rule.sparse_alternative} instead: "
            f"the gradient of {name} has layout {grad.layout}"
        )
    if is_wrapper(grad):
        raise TypeError(
            f"the gradient of {name} is a {type(grad).__name__}, a tensor that wraps other tensors; convert it to a "
            "plain tensor before the step"
        )
    if param.layout != torch.strided:
        raise RuntimeError(f"{optimizer} does not support sparse parameters, but {name} has layout {param.layout}")
    if grad.shape != param.shape:
        raise RuntimeError(
            f"the gradient of {name} has shape {tuple(grad.shape)}, but the parameter has {tuple(param.shape)}; "
            "set its .grad to None and run backward() again"
        )
    if grad.device != param.device:
        raise RuntimeError(
            f"the gradient of {name} is on {grad.device}, but the parameter is on {param.device}; "
            "move both, or set its .grad to None and run backward() again"
        )
    if grad.is_complex() and not param.is_complex():
        raise RuntimeError(f"the gradient of {name} is {grad.dtype}, but the parameter is real ({param.dtype})")
    if layout.is_freed(param):
        raise RuntimeError(
            f"{name} has no memory: its storage was resized to {param.untyped_storage().nbytes()} bytes; restore its "
            "memory before the step, or set its .grad to None"
        )
    if layout.is_expanded(param):
        raise RuntimeError(
            f"{name} is an expanded tensor with strides {param.stride()}: several of its elements share memory and "
            "cannot be updated in place; clone() it before it becomes a parameter"
        )
