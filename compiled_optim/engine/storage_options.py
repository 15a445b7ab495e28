"""The options ``state_dtype``, ``rounding`` and ``master_weights`` of a group, and the storages they select."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch

from compiled_optim.quantization import BLOCK, blocks
from compiled_optim.storage import (
    LOW_PRECISION,
    Compensated,
    MasterWeights,
    Quantized,
    Storage,
    compute_dtype,
    storage_for,
)
from compiled_optim.update_program import EMA, UpdateProgram

EIGHT_BIT: Literal["8bit"] = "8bit"
QUANTIZED_FROM = 4096
"""Tensors with fewer elements keep states in float32 instead of 8 bits: they take little memory."""

Kept: TypeAlias = torch.dtype | Literal["8bit"]
StateDtype: TypeAlias = Kept | Mapping[str, Kept]
Rounding: TypeAlias = Literal["nearest", "stochastic", "kahan"]

STATE_DTYPES: tuple[Kept, ...] = (torch.float32, torch.bfloat16, torch.float16, EIGHT_BIT)
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic", "kahan")
KEYS = ("state_dtype", "rounding", "master_weights", "rounding_seed")
"""The keys of a group that say how it is stored. They belong to the optimizer, not to a checkpoint."""


STORAGE_REMEDIES = {
    EIGHT_BIT: "state_dtype=torch.bfloat16",
    "stochastic": "master_weights=True, or a state_dtype with rounding='nearest'",
}
"""What to use instead of a storage that a backend refuses."""


@dataclass(frozen=True)
class Formats:
    """How one parameter and its states are kept.

    ``param`` is the storage of the parameter, None for the usual one. ``states`` are the formats of the states that the
    options name. ``stochastic`` names the states that are rounded stochastically if they are kept in low precision.
    """

    param: Storage | None = None
    states: tuple[tuple[str, Kept], ...] = ()
    stochastic: tuple[str, ...] = ()

    def of(self, state: str) -> Kept | None:
        """Return the format of a state; None if no option names it."""
        return next((kept for name, kept in self.states if name == state), None)


USUAL = Formats()


def stored_options(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values of KEYS in a group, for comparison with later ones."""
    found = map(group.get, KEYS)
    return tuple(dict(value) if isinstance(value, Mapping) else value for value in found)


def _rounds_at_random(group: Mapping[str, Any], is_named: bool) -> bool:
    """Return True if states in low precision are rounded stochastically: those that ``state_dtype`` names, or others.

    Parameters are rounded like the others.
    """
    rounding = group.get("rounding")
    return rounding in ("stochastic", "kahan") or (is_named and rounding != "nearest")


def uses_seed(group: Mapping[str, Any]) -> bool:
    """Return True if a tensor of a group may be rounded stochastically."""
    if _rounds_at_random(group, False):
        return True
    chosen = group.get("state_dtype")
    if chosen is None:
        return False
    kept = {*(chosen.values() if isinstance(chosen, Mapping) else (chosen,))}
    return EIGHT_BIT in kept or (_rounds_at_random(group, True) and bool(kept & {*LOW_PRECISION}))


def formats_for(
    group: Mapping[str, Any],
    states: Sequence[str],
    dtype: torch.dtype,
    sizes: Collection[int],
    nonnegative: Collection[str],
    whole_blocks: bool,
    unquantized: Collection[str] = (),
) -> Formats:
    """Return how a parameter of ``dtype`` and its states are kept.

    ``sizes`` are the numbers of elements that the processes hold of it: 8 bits are for parameters of which each shard
    is large enough, so that all processes decide alike. ``nonnegative`` names states without a sign, ``unquantized``
    those that are never kept in 8 bits. With ``whole_blocks``, 8 bits are for shards of whole blocks only.
    """
    chosen, rounding = group.get("state_dtype"), group.get("rounding")
    storage: Storage | None = None
    if dtype in LOW_PRECISION:
        if group.get("master_weights"):
            storage = MasterWeights()
        elif rounding == "kahan":
            storage = Compensated()
        elif rounding == "stochastic":
            storage = storage_for(dtype, torch.float32, True)
    named: Mapping[str, Kept] = {}
    if chosen is None and storage is not None:
        chosen = torch.float32 if isinstance(storage, MasterWeights) else dtype
    if chosen is not None:
        named = chosen if isinstance(chosen, Mapping) else _for_all(chosen, states, nonnegative)
    is_small = min(sizes) < QUANTIZED_FROM or (whole_blocks and any(size % BLOCK for size in sizes))
    kept = {
        name: compute_dtype(dtype) if each == EIGHT_BIT and (is_small or name in unquantized) else each
        for name, each in named.items()
        if name in states
    }
    stochastic = tuple(name for name in states if _rounds_at_random(group, name in kept))
    return Formats(storage, tuple(kept.items()), stochastic) if kept or storage or stochastic else USUAL


def _for_all(chosen: Kept, states: Sequence[str], nonnegative: Collection[str]) -> dict[str, Kept]:
    """Return the format of each state. Squares of small gradients vanish in float16, so bfloat16 takes its place."""
    return {
        name: torch.bfloat16 if chosen == torch.float16 and name in nonnegative else chosen
        for name in states
        if name != EMA
    }


def with_storages(
    program: UpdateProgram, kept: Sequence[torch.dtype], formats: Formats, nonnegative: Collection[str], rows: bool
) -> UpdateProgram:
    """Return the program for parameters and states in these dtypes.

    ``nonnegative`` names states without a sign. ``rows`` says that the rule sees rows, which take the place of blocks.
    """
    dtype = compute_dtype(kept[0])
    storages = [formats.param or storage_for(kept[0], dtype)]
    for name, each in zip(program.states, kept[1:], strict=False):
        if formats.of(name) == EIGHT_BIT:
            storages.append(Quantized(name not in nonnegative))
        else:
            storages.append(storage_for(each, dtype, name in formats.stochastic))
    owners = ("", *program.states)
    companions = [
        owner + name if name.startswith("_") else name
        for owner, storage in zip(owners, storages, strict=True)
        for name in storage.companions
    ]
    has_blocks = not rows and any(storage.by_rows for storage in storages)
    return replace(program, dtype=dtype, storages=tuple(storages), companions=tuple(companions), has_blocks=has_blocks)


def companion_dtypes(formats: Formats, states: Sequence[str], dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the dtypes of the companions of a parameter of ``dtype``, in the order of the program."""
    own = [] if formats.param is None else [dtype if formats.param == Compensated() else torch.float32]
    has_companions = formats.param is not None and bool(formats.param.companions)
    quantized = [torch.float32 for name in states if formats.of(name) == EIGHT_BIT]
    return (*(own if has_companions else ()), *quantized)


def bytes_by_list(program: UpdateProgram, dtypes: Sequence[torch.dtype], shape: Sequence[int]) -> dict[str, int]:
    """Return the bytes of a parameter whose working view has this shape, by the name of the list."""
    names = ("gradients", "parameters", *program.kept)
    elements = math.prod(shape)
    rows = blocks(elements) if len(shape) == 1 else shape[0]
    return {
        name: (rows if i in program.row_lists else math.prod(program.list_shape(i, shape))) * dtype.itemsize
        for i, (name, dtype) in enumerate(zip(names, dtypes, strict=True))
    }


def check_storage(
    optimizer: str, group: Mapping[str, Any], states: Sequence[str], nonnegative: Collection[str]
) -> None:
    """Raise ValueError or TypeError if an option of a group is out of range, or does not fit its parameters."""
    if not any(group.get(key) for key in KEYS):
        return
    chosen, rounding = group.get("state_dtype"), group.get("rounding")
    possible = ", ".join(f'"{each}"' if isinstance(each, str) else str(each) for each in STATE_DTYPES)
    if isinstance(chosen, Mapping):
        unknown = [name for name in chosen if name not in states]
        if unknown:
            raise ValueError(
                f"state_dtype names the state {unknown[0]!r}, but {optimizer} keeps {list(states) or 'no states'}"
            )
        unsuitable = [name for name, each in chosen.items() if each == torch.float16 and name in nonnegative]
        if unsuitable:
            raise ValueError(
                f"{unsuitable[0]!r} cannot be kept in float16: squares of gradients below 2.4e-4 would vanish; use "
                "torch.bfloat16"
            )
        if chosen.get(EMA) == EIGHT_BIT:
            usable = ", ".join(str(each) for each in STATE_DTYPES if each != EIGHT_BIT)
            raise ValueError(
                f"the average of the weights, {EMA!r}, cannot be kept in 8 bits: ema() writes it into the weights; use "
                f"{usable}, or leave it out to keep it in float32"
            )
    for each in chosen.values() if isinstance(chosen, Mapping) else (chosen,):
        if each is not None and each not in STATE_DTYPES:
            raise ValueError(f"Invalid state_dtype value: {each!r}; use {possible}, or a dict of these by state")
    if rounding is not None and rounding not in ROUNDINGS:
        raise ValueError(f"Invalid rounding value: {rounding!r}; use one of {', '.join(map(repr, ROUNDINGS))}")
    if group.get("master_weights") and rounding in ("stochastic", "kahan"):
        raise ValueError(
            f"master_weights=True keeps weights in float32, so rounding={rounding!r} has no use; pass one of both"
        )
    seed = group.get("rounding_seed", 0)
    if not isinstance(seed, int):
        raise TypeError(f"rounding_seed takes an int, but got {type(seed).__name__}")
    for param in group["params"]:
        if param.is_complex():
            raise ValueError(
                f"{optimizer} keeps complex parameters and their states as they are, but a group with "
                f"{', '.join(key for key in KEYS if group.get(key))} has one of shape {tuple(param.shape)}; put it "
                "into a group without these options"
            )
    if rounding == "nearest" and {*LOW_PRECISION} & {*_low(chosen)}:
        warnings.warn(
            f"{optimizer} rounds states in {', '.join(map(str, _low(chosen)))} to nearest: an average with a decay "
            'above 0.996 stays where it is, because a step changes it by less than half of its last bit; use rounding="'
            'stochastic"',
            stacklevel=2,
        )


def _low(chosen: StateDtype | None) -> list[torch.dtype]:
    kept = chosen.values() if isinstance(chosen, Mapping) else (chosen,)
    return [each for each in kept if isinstance(each, torch.dtype) and each in LOW_PRECISION]
