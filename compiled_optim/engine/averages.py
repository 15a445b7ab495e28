"""Averages of the weights: use those of ``ema_decay`` in place of the weights, and interpolate weights and states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from compiled_optim.engine.rule import Group, all_params
from compiled_optim.engine.states import State
from compiled_optim.engine.storage_options import uses_seed
from compiled_optim.engine.stored_states import COMPANIONS, COMPENSATION, MASTER
from compiled_optim.engine.tensor_types import local_shard
from compiled_optim.storage import Compensated, MasterWeights, Storage, compute_dtype
from compiled_optim.tensors import Tensors
from compiled_optim.update_program import EMA, EMA_DECAY

STORAGES_OF_WEIGHTS: dict[str, Storage] = {COMPENSATION: Compensated(), MASTER: MasterWeights()}
"""The storages that keep exact weights behind those in low precision, by the name of their companion."""


def needs_step_counts(group: Group) -> bool:
    """Return True if the options of a group depend on the step: the warm-up of an average, or random rounding."""
    return bool(group.get("ema_warmup") and group.get(EMA_DECAY) is not None) or uses_seed(group)


def check_average(group: Group) -> None:
    """Raise ValueError if the options of an average are out of range."""
    decay = group.get(EMA_DECAY)
    if decay is not None and not 0.0 <= decay < 1.0:
        raise ValueError(f"Invalid ema_decay value: {decay}; it must be at least 0 and below 1")


@contextmanager
def swapped_in(groups: Sequence[Group], state: State) -> Iterator[None]:
    """Write the averages into the parameters; restore the weights at the end, also after an exception.

    Copies of the weights are kept in the meantime. Parameters may be converted or moved in this context.
    """
    averages = _averages(groups, state)
    if not averages:
        raise RuntimeError("there is no average yet: pass ema_decay to the optimizer, and make a step")
    weights = [_memory_of(param).clone() for param in averages]
    try:
        with torch.no_grad():
            torch._foreach_copy_([*map(_memory_of, averages)], [*map(local_shard, averages.values())])
        yield
    finally:
        with torch.no_grad():
            # the memory of now: the parameters may have been pointed elsewhere, as module.double() does
            params = [*map(_memory_of, averages)]
            torch._foreach_copy_(params, [saved.to(param) for param, saved in zip(params, weights, strict=True)])


def averages_by_name(groups: Sequence[Group], state: State) -> dict[str, Tensor]:
    """Return a copy of each average, or of the parameter if it has none, by its name or, without names, its index."""
    averages = _averages(groups, state)
    names = [name for group in groups for name in group.get("param_names", ())]
    params = all_params(groups)
    if len(names) != len(params):
        names = [str(index) for index in range(len(params))]
    return {name: averages.get(param, param).detach().clone() for name, param in zip(names, params, strict=True)}


@torch.no_grad()
def move_towards(name: str, params: Iterable[Tensor], state: State, weight: float) -> None:
    """Interpolate between parameters and one of their states, in place: ``p += weight * (state - p)``.

    Parameters without the state stay as they are. Master weights and compensations are updated too.
    """
    for param in params:
        values = state.get(param, {})
        if values.get(name) is None:
            continue
        weights, target = local_shard(param).detach(), local_shard(values[name])
        if target.dtype == weights.dtype and not values.keys() & {*COMPANIONS}:
            weights.lerp_(target, weight)
            continue
        dtype = compute_dtype(weights.dtype)
        exact, stored = weights.to(dtype), []
        for key, storage in STORAGES_OF_WEIGHTS.items():
            if values.get(key) is not None:
                companions = [[local_shard(values[key])]]
                stored.append((storage, companions))
                (exact,) = storage.load([weights], companions, dtype)
        exact = exact.lerp(target.to(dtype), weight)
        weights.copy_(exact)
        for storage, companions in stored:
            storage.store([weights], companions, Tensors([exact]), None, 0)


def _memory_of(param: Tensor) -> Tensor:
    """Return what this process holds of a parameter, as a tensor that can be written to."""
    return local_shard(param).detach()


def _averages(groups: Sequence[Group], state: State) -> dict[Tensor, Tensor]:
    found = {
        param: state.get(param, {}).get(EMA) for group in groups if EMA_DECAY in group for param in group["params"]
    }
    return {param: average for param, average in found.items() if average is not None}
