"""The names of parameters: in the groups of an optimizer, and in messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from compiled_optim.engine.rule import Group
from compiled_optim.guard.module_changes import Place, Places


def names_of(group: Group) -> Sequence[str] | None:
    """Return ``param_names`` of a group; None if it has none, or if user code has edited only one of the lists."""
    names: Sequence[str] | None = group.get("param_names")
    return names if names is not None and len(names) == len(group["params"]) else None


def message_names(
    groups: Sequence[Group], places: Places, modules: Collection[object], renamed: Mapping[Tensor, str]
) -> list[str]:
    """Return the names of all parameters for messages: the name if known, else the group and the index.

    ``places`` are those of parameters of the watched ``modules``. ``renamed`` are new names of some parameters.
    """
    found = []
    for number, group in enumerate(groups):
        given: Sequence[str | None] | None = names_of(group)
        if given is None:
            given = [place_name(places[param][0], modules) if param in places else None for param in group["params"]]
        found += [
            f"parameter {position} of group {number}" if name is None else f"parameter {renamed.get(param, name)!r}"
            for position, (param, name) in enumerate(zip(group["params"], given, strict=True))
        ]
    return found


def place_name(place: Place, modules: Collection[object]) -> str:
    """Return the name of a place. If several modules are watched, it begins with the type of its module."""
    return place.name if len(modules) == 1 else f"{type(place.module).__name__}.{place.name}"


def follow_name(given: str, before: Sequence[Place], now: Sequence[Place]) -> str | None:
    """Return the new name of a parameter that was at the places ``before`` and is at the places ``now``.

    ``given`` is the name that the optimizer has for it. It may have a prefix that the names in the watched module lack,
    or lack one that they have, as it is with wrapped modules. Return None if it is none of these names.
    """
    related = [place for place in before if _renamed(given, place.name, place.name) is not None]
    if not related:
        return None
    old = next((place for place in related if place.name == given), related[0])
    near = [place for place in now if place.module is old.module] or now
    if any(place.name == old.name for place in near):
        return given
    new = next((place for place in near if place.attribute == old.attribute), near[0])
    return _renamed(given, old.name, new.name)


def _renamed(given: str, old: str, new: str) -> str | None:
    """Return a name in which ``old`` becomes ``new``; None if it does not end with ``old``, nor ``old`` with it."""
    if f".{given}".endswith(f".{old}"):
        return given.removesuffix(old) + new
    if old.endswith(f".{given}"):
        return new.removeprefix(old.removesuffix(given))
    return None
