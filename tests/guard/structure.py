"""The rule of docs/guard.md for modules that hold other parameters, written down once more for the fuzz.

A parameter that is still in the module stays in the optimizer. One that is gone was replaced by the new parameter that
is the same attribute of the same submodule, or has the same name if that submodule is gone; without one, it was
removed. A new parameter where one was removed comes into its group. Other new parameters do not belong to the
optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from .place import Place


@dataclass(frozen=True, eq=False)
class Slot:
    """Where a parameter is. ``path`` is its name without the parts of a parametrization."""

    place: Place
    owner: nn.Module | None
    attribute: str
    path: str
    name: str


def slots_of(net: nn.Module, content: Mapping[Tensor, Place]) -> Iterator[Slot]:
    """Yield the slots of all parameters of a module, of which ``content`` has the expected content."""
    for prefix, module in net.named_modules():
        for key, param in module._parameters.items():
            if param is None:
                continue
            owner, path, attribute = module, prefix, key
            if isinstance(module, ParametrizationList):
                path, _, attribute = prefix.rpartition(".parametrizations.")
                owner = net.get_submodule(path)
            yield Slot(content[param], owner, attribute, f"{path}.{attribute}", f"{prefix}.{key}")


class Structure:
    """The slots of a module when the optimizer last looked at it, and those of removed parameters."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = list(slots)
        self.vacant: list[tuple[int, Slot]] = []

    def is_same(self, now: Sequence[Slot]) -> bool:
        return {(slot.place, slot.name) for slot in self.slots} == {(slot.place, slot.name) for slot in now}

    def lost(self, now: Sequence[Slot]) -> list[Slot]:
        """Return the slots of parameters of the optimizer that are gone."""
        present = {slot.place for slot in now}
        return [slot for slot in self.slots if slot.place.group is not None and slot.place not in present]

    def follow(self, net: nn.Module, now: Sequence[Slot], apply: bool = True) -> set[str]:
        """Give new parameters their groups, and return the names of all parameters that were replaced or removed.

        With ``apply=False`` only the names are returned.
        """
        modules = {*net.modules()}
        known = {slot.place for slot in self.slots}
        fresh = [slot for slot in now if slot.place not in known]
        groups: dict[Place, int] = {}

        def find(old: Slot, among: Sequence[Slot]) -> Slot | None:
            def is_there(slot: Slot) -> bool:
                if old.owner in modules:
                    return slot.owner is old.owner and slot.attribute == old.attribute
                return slot.path == old.path

            return next((slot for slot in among if is_there(slot) and slot.place not in groups), None)

        lost = self.lost(now)
        names = {slot.name for slot in lost}
        removed = []
        for old in sorted(lost, key=lambda slot: slot.owner not in modules):
            new = find(old, fresh)
            if new is None:
                removed.append((old.place.group, old))
            else:
                groups[new.place] = old.place.group
        for group, old in self.vacant:
            new = find(old, fresh)
            if new is not None:
                groups[new.place] = group
                names.add(new.name)
        if apply:
            vacant = [
                (group, old if old.owner in modules else replace(old, owner=None))
                for group, old in (*self.vacant, *removed)
            ]
            self.slots = list(now)
            for place, group in groups.items():
                place.group = group
            groups.clear()
            self.vacant = [(group, old) for group, old in vacant if find(old, now) is None]
        return names
