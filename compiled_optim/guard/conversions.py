"""Recognise parameters that a module has converted into new objects: by ``.to(...)``, ``.half()`` and similar methods.

A module does so if ``p.data = ...`` is not possible between the old and the new kind of tensor, as between the CPU and
some other devices, or if ``set_overwrite_module_params_on_conversion`` is set. A conversion is recognised by the
values: they are the old ones, possibly rounded to a lower precision.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from compiled_optim.engine.tensor_types import has_memory, local_shard
from compiled_optim.guard.module_changes import Holders, Place, Places
from compiled_optim.torch_private import shallow_copy_check


def find_conversions(
    before: Places, now: Places, holders: Holders, held: Collection[Tensor]
) -> dict[Tensor, list[Tensor]]:
    """Return the parameters that have become new objects, with these objects: several for a tied parameter.

    A new object is at a place of the old one. If there is none, the parameter may have got another name in its
    submodule.

    Args:
        before: the parameters of the modules, and their places, when they were last recorded.
        now: the same, now.
        holders: the parameters at each place, now.
        held: the parameters of the optimizer.
    """
    lost = [param for param in reversed(before) if param not in now]  # if several were at a place, first the latest
    fresh = {param for param in now if param not in before and param not in held}
    if not lost or not fresh:
        return {}
    found: dict[Tensor, list[Tensor]] = {}
    for old in lost:
        for place in before[old]:
            for new in holders.at(place):
                if new in fresh and _has_leaf(now[new], place.leaf) and _is_conversion(old, new):
                    found.setdefault(old, []).append(new)
                    fresh.discard(new)
    taken = {place.attribute for places in before.values() for place in places}
    renamed: dict[int, list[Tensor]] = {}
    for new in fresh:
        for place in now[new]:
            if place.attribute not in taken:
                renamed.setdefault(id(place.owner), []).append(new)
    for old in lost:
        if old not in found:
            match = next((new for new in _in_same_modules(before[old], renamed) if _is_conversion(old, new)), None)
            if match is not None:
                found[old] = [match]
    return found


def _has_leaf(places: Collection[Place], leaf: str) -> bool:
    return any(place.leaf == leaf for place in places)


def _in_same_modules(places: Collection[Place], renamed: dict[int, list[Tensor]]) -> Iterator[Tensor]:
    for place in places:
        yield from renamed.get(id(place.owner), ())


def _is_conversion(old: Tensor, new: Tensor) -> bool:
    # one without memory may have no shape either
    if not has_memory(old) or not has_memory(new) or old.shape != new.shape:
        return False
    kinds = (new, torch.empty(0, device="cpu"))  # the model may have been on the CPU in between
    can_assign = shallow_copy_check()
    in_place = all(can_assign(old, kind) for kind in kinds)
    if in_place and not torch.__future__.get_overwrite_module_params_on_conversion():
        return False
    old, new = local_shard(old), local_shard(new)
    moved = old.to(new.device)
    ways = (new.dtype, torch.float16, torch.bfloat16, torch.float32)
    return any(torch.equal(moved.to(way).to(new.dtype), new) for way in ways)
