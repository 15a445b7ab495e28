"""What an optimizer has last seen of its parameters and of the watched modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from compiled_optim.engine.tensor_types import has_memory
from compiled_optim.guard.change import Description
from compiled_optim.guard.module_changes import Place, Places
from compiled_optim.guard.watch import Watch


class Vacancy(NamedTuple):
    """The group, the name and the places of a parameter that was removed. A new one at its place is adopted."""

    group: int
    name: str | None
    places: Sequence[Place]


class Record(NamedTuple):
    """The description of each parameter that has memory, the watched modules, and the removed parameters."""

    seen: Mapping[Tensor, Description]
    watches: Sequence[Watch]
    vacant: Sequence[Vacancy]

    def places(self) -> Places:
        """Return the recorded places of the parameters of all watched modules."""
        return _by_param(pair for watch in self.watches for pair in watch.held)

    def current_places(self) -> Places:
        """Return the places where the parameters are now."""
        return _by_param(pair for watch in self.watches for pair in watch.read())

    def submodules(self) -> set[int]:
        """Return the ids of all submodules of the watched modules."""
        return {id(module) for watch in self.watches for module in watch.module.modules()}


def _by_param(pairs: Iterable[tuple[Tensor, Place]]) -> Places:
    found: dict[Tensor, list[Place]] = {}
    for param, place in pairs:
        found.setdefault(param, []).append(place)
    return found


def describe(params: Iterable[Tensor]) -> dict[Tensor, Description]:
    """Return the description of each parameter that has memory."""
    return {param: Description.from_tensor(param) for param in params if has_memory(param)}
