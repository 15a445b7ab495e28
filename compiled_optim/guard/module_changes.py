"""Compare the parameters that watched modules hold with those they held before: which were replaced, removed or added.

The rule is *identity first*. A parameter that is still in a watched module stays in the optimizer, whatever its name. A
place is the name of a parameter in a module. A parameter that has left a place without appearing at another one was
replaced by the new parameters that are there now, or removed if there are none. A new parameter at any other place is
added: the optimizer does not step it.

Parametrizations keep the tensors that a parameter is computed from as ``parametrizations.<name>.original`` or
``.original0``, ``.original1``. These names belong to the place of the parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn

_ORIGINAL = re.compile(r"(?<![^.])parametrizations\.([^.]+)\.original\d*$")


class Place(NamedTuple):
    """A watched module, and the name of a parameter in it."""

    module: nn.Module
    name: str

    @property
    def unparametrized(self) -> Place:
        """The place of the parameter that this one parametrizes; the place itself for any other parameter."""
        return Place(self.module, _ORIGINAL.sub(r"\1", self.name))


Places = Mapping[Tensor, Sequence[Place]]
"""Parameters and their places; a tied parameter has several."""


@dataclass
class ModuleChanges:
    """What has changed in the watched modules.

    ``replaced`` maps a parameter of the optimizer to the new parameters at its places. If the parameter is still in a
    module, it was tied and some of its places hold a new one. ``removed`` maps a parameter to the known one that is now
    at its place, or to None. ``set_again`` maps a new parameter to a place where one was removed, and ``added`` contains
    all other new parameters.
    """

    replaced: dict[Tensor, list[Tensor]] = field(default_factory=dict)
    removed: dict[Tensor, Tensor | None] = field(default_factory=dict)
    set_again: dict[Tensor, Place] = field(default_factory=dict)
    added: list[Tensor] = field(default_factory=list)


def compare_modules(before: Places, now: Places, held: Iterable[Tensor], vacant: Iterable[Place]) -> ModuleChanges:
    """Return what has changed in the watched modules.

    Args:
        before: the parameters of the modules, and their places, when they were last recorded.
        now: the same, now.
        held: the parameters of the optimizer.
        vacant: the places from which parameters of the optimizer were removed before.
    """
    holders: dict[Place, list[Tensor]] = {}
    for param, places in now.items():
        for place in places:
            holders.setdefault(place.unparametrized, []).append(param)
    known = {*before, *held}
    fresh = {param for param in now if param not in known}

    def take(places: Iterable[Place]) -> list[Tensor]:
        """Return the new parameters at these places that were not returned yet."""
        found = list(dict.fromkeys(param for place in places for param in holders.get(place, ()) if param in fresh))
        fresh.difference_update(found)
        return found

    def is_at_home(param: Tensor) -> bool:
        """Return True if a parameter was known, and is not only at places where it was not before."""
        home = slots(before.get(param, ()))
        return param in known and (not home or any(place in home for place in slots(now[param])))

    changes = ModuleChanges()
    for param in held:
        if param not in before or before[param] == now.get(param):
            continue
        old, current = slots(before[param]), slots(now.get(param, ()))
        if not old.keys() >= current.keys():  # it was moved
            continue
        lost = [place for place in old if place not in current]
        found = take(lost)
        if found:
            changes.replaced[param] = found
        elif not current:
            others = (other for place in lost for other in holders.get(place, ()))
            changes.removed[param] = next(filter(is_at_home, others), None)
    for place in vacant:
        changes.set_again |= dict.fromkeys(take([place]), place)
    changes.added = [param for param in now if param in fresh and param.requires_grad]
    return changes


def slots(places: Iterable[Place]) -> dict[Place, None]:
    """Return places without parametrizations, each once, in order."""
    return dict.fromkeys(place.unparametrized for place in places)
