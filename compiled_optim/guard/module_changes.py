"""Compare the parameters that watched modules hold with those they held before: which were replaced, removed or added.

The rule is *identity first*: a parameter that is still in a watched module stays in the optimizer, whatever its name. A
parameter that has left its place, and is at no new one, was replaced by the new parameters that are there now, or
removed if there are none. All other new parameters are added: the optimizer does not step them.

The place of a parameter is an attribute of a submodule. If that submodule is gone, it is the name of the parameter.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

_ORIGINAL = re.compile(r"(?<![^.])parametrizations\.([^.]+)\.original\d*$")


def unparametrized(name: str) -> str:
    """Return the name of the parameter that a parameter parametrizes; the name itself for any other one.

    A parametrized module keeps the tensors from which ``weight`` is computed as ``parametrizations.weight.original``,
    or as ``.original0``, ``.original1``. They are at the place of ``weight``.
    """
    return _ORIGINAL.sub(r"\1", name)


Key = tuple[int, str]
"""The id of a module, and a name in it."""


@dataclass(frozen=True, eq=False)
class Place:
    """Where a parameter is: its ``name`` in a watched ``module``, and the submodule that has it as an attribute.

    ``owner`` is None if it is not known. Modules are compared by identity, because they may define ``==``.
    """

    module: nn.Module
    name: str
    owner: nn.Module | None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[int, str, int]:
        return id(self.module), self.name, id(self.owner)

    @property
    def path(self) -> Key:
        """A key for the watched module and the name in it."""
        return id(self.module), unparametrized(self.name)

    @property
    def attribute(self) -> Key:
        """A key for the submodule and the name of the attribute; the same as ``path`` if the submodule is unknown."""
        if self.owner is None:
            return self.path
        return id(self.owner), unparametrized(self.name).rpartition(".")[2]

    @property
    def leaf(self) -> str:
        """The last part of the name. It is ``weight`` for the only tensor from which ``weight`` is computed."""
        leaf = self.name.rpartition(".")[2]
        return unparametrized(self.name).rpartition(".")[2] if leaf == "original" else leaf

    @property
    def keys(self) -> set[Key]:
        """Both keys. Two places are the same if they have one in common."""
        return {self.attribute, self.path}


Places = dict[Tensor, list[Place]]
"""Parameters and their places; a tied parameter has several."""


class Holders:
    """The parameters at each place of the watched modules.

    Args:
        places: the parameters of the modules and their places.
        modules: the ids of all submodules.
    """

    def __init__(self, places: Places, modules: Collection[int]) -> None:
        self._modules = modules
        self._params: dict[Key, list[Tensor]] = {}
        for param, own in places.items():
            for key in _keys(own):
                self._params.setdefault(key, []).append(param)

    def at(self, place: Place) -> Sequence[Tensor]:
        """Return the parameters at a place."""
        return self._params.get(place.path if self.is_gone(place) else place.attribute, ())

    def is_gone(self, place: Place) -> bool:
        """Return True if the submodule of a place is gone."""
        return id(place.owner) not in self._modules

    def without_gone(self, place: Place) -> Place:
        """Return a place that does not refer to its submodule if that is gone."""
        return replace(place, owner=None) if self.is_gone(place) else place


@dataclass
class ModuleChanges:
    """What has changed in the watched modules.

    ``replaced`` maps a parameter of the optimizer to the new parameters at its places. If the parameter is still in a
    module, it was tied, and some of its places hold a new one. ``removed`` maps a parameter to the known one that is
    now at its place, or to None. ``set_again`` maps a new parameter to the number of a vacancy that it fills, and
    ``added`` contains all other new parameters.
    """

    replaced: dict[Tensor, list[Tensor]] = field(default_factory=dict)
    removed: dict[Tensor, Tensor | None] = field(default_factory=dict)
    set_again: dict[Tensor, int] = field(default_factory=dict)
    added: list[Tensor] = field(default_factory=list)


def compare_modules(
    before: Places, now: Places, holders: Holders, held: Iterable[Tensor], vacant: Iterable[Sequence[Place]]
) -> ModuleChanges:
    """Return what has changed in the watched modules.

    Args:
        before: the parameters of the modules, and their places, when they were last recorded.
        now: the same, now.
        holders: the parameters at each place, now.
        held: the parameters of the optimizer.
        vacant: the places of each parameter that was removed earlier.
    """
    known = {*before, *held}
    fresh = {param for param in now if param not in known}

    def take(places: Iterable[Place]) -> list[Tensor]:
        """Return the new parameters at these places that were not returned yet."""
        found = list(dict.fromkeys(param for place in places for param in holders.at(place) if param in fresh))
        fresh.difference_update(found)
        return found

    def has_its_name(param: Tensor) -> bool:
        """Return True if a known parameter has a name that it had before, so that it did not move here."""
        names = {place.path for place in before.get(param, ())}
        return param in known and (not names or any(place.path in names for place in now[param]))

    lost: dict[Tensor, list[Place]] = {}
    for param in held:
        if param not in before or before[param] == now.get(param):
            continue
        old, current = before[param], now.get(param, ())
        old_keys, current_keys = _keys(old), _keys(current)
        if not any(place.keys.isdisjoint(old_keys) for place in current):  # else it was moved
            lost[param] = [place for place in old if place.keys.isdisjoint(current_keys)]

    changes = ModuleChanges()
    # first attributes of submodules that are still there: their new parameters may have the names of others
    for is_gone in (False, True):
        for param, places in lost.items():
            found = take(place for place in places if holders.is_gone(place) == is_gone)
            if found:
                changes.replaced.setdefault(param, []).extend(found)
    for param, places in lost.items():
        if param not in now and param not in changes.replaced:
            others = (other for place in places for other in holders.at(place))
            changes.removed[param] = next(filter(has_its_name, others), None)
    for number, own in enumerate(vacant):
        changes.set_again |= dict.fromkeys(take(own), number)
    changes.added = [param for param in now if param in fresh and param.requires_grad]
    return changes


def _keys(places: Iterable[Place]) -> set[Key]:
    return {key for place in places for key in place.keys}
