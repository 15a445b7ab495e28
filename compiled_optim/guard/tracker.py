"""Find the parameters that were reallocated since the last step, and move their states to the new device and dtype.

A parameter is tracked from the moment the optimizer gets it, or once it has memory if it is lazy or on the meta device.
That a parameter was replaced or removed can be seen only in a watched module.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compiled_optim.engine.rule import Group, all_params
from compiled_optim.engine.states import State, convert_states
from compiled_optim.engine.tensor_types import has_memory, local_shard
from compiled_optim.guard.change import Change, Description, compare, removal, replacement
from compiled_optim.guard.watch import Watch
from compiled_optim.torch_private import shallow_copy_check

Place = tuple[Watch, str]


@dataclass(frozen=True)
class Move:
    """A change of one parameter, and how the optimizer follows it.

    ``members`` are the parameters, by name, that replace it in its group; None keeps it there. ``heirs`` take over its
    state. ``param`` is None for a parameter that is set again after it was removed. ``change`` is None if the parameter
    had no memory before.
    """

    change: Change | None
    group: int
    param: Tensor | None
    members: Mapping[str, Tensor] | None = None
    heirs: Sequence[Tensor] = ()


class Tracker:
    """Records the metadata and address of each parameter of an optimizer, and the modules that are watched."""

    def __init__(self) -> None:
        self._seen: dict[Tensor, Description] = {}
        self.watches: list[Watch] = []
        self._vacant: dict[Place, int] = {}
        self._is_current = False  # whether find() has found no difference

    def watch(self, module: nn.Module) -> None:
        """Watch a module; record its new parameters if it is watched already."""
        for watch in self.watches:
            if watch.module is module:
                watch.notice_new_places()
                return
        self.watches.append(Watch(module))

    def copy_from(self, original: Tracker, memo: dict[int, Any]) -> None:
        """Copy the records of the original for the parameters and modules in the ``memo`` of a deepcopy."""
        watches = [watch for watch in original.watches if id(watch.module) in memo]
        vacant = {place: group for place, group in original._vacant.items() if place[0] in watches}
        self.watches, self._vacant = copy.deepcopy((watches, vacant), memo)
        for param, description in original._seen.items():
            if id(param) in memo:
                twin = memo[id(param)]
                self._seen[twin] = description._replace(address=local_shard(twin).data_ptr())

    def add(self, params: Sequence[Tensor]) -> None:
        """Start to track parameters."""
        for watch in self.watches:
            watch.notice_new_places()
        for param, description in _descriptions(params).items():
            self._seen.setdefault(param, description)

    def modules_unchanged(self) -> bool:
        """Return True if the watched modules hold the same parameters. The guard checks the memory of parameters."""
        return all(watch.holds() for watch in self.watches)

    def names(self, groups: Sequence[Group]) -> list[str]:
        """Return the names of all parameters for messages: the name if known, else the group and the index."""
        watched = {param: self._name(places[0]) for param, places in self._places().items()}
        names = []
        for number, group in enumerate(groups):
            given = group.get("param_names", ())
            if len(given) != len(group["params"]):  # user code has edited the list, so the names no longer match
                given = [watched.get(param) for param in group["params"]]
            names += [
                f"parameter {position} of group {number}" if name is None else f"parameter {name!r}"
                for position, name in enumerate(given)
            ]
        return names

    def find(self, groups: Sequence[Group]) -> list[Move]:
        """Return how the parameters in these groups have changed since they were last recorded."""
        held = all_params(groups)
        self._is_current = _descriptions(held) == self._seen and self.modules_unchanged()
        if self._is_current:
            return []
        names = dict(zip(held, self.names(groups), strict=True))
        numbers = {param: number for number, group in enumerate(groups) for param in group["params"]}
        moves = [] if self.modules_unchanged() else self._look_into_modules(names, numbers)
        left = {move.param for move in moves if all(heir is not move.param for heir in move.heirs)}
        for param, name in names.items():
            before = self._seen.get(param)
            now = Description.from_tensor(param) if before is not None and param not in left else before
            if before is not None and now is not None and now != before:
                change = compare(name, before, now)
                if change is not None:
                    moves.append(Move(change, numbers[param], param, heirs=[param]))
        order = {param: i for i, param in enumerate(names)}
        return sorted(moves, key=lambda move: len(order) if move.param is None else order[move.param])

    def apply(self, groups: Sequence[Group], state: State, moves: Sequence[Move]) -> None:
        """Update the groups, and convert the states. A parameter whose shape changed gets a new state."""
        for move in moves:
            if move.members is not None:
                _splice(groups[move.group], move.param, move.members)
            if move.param is None:
                continue
            before, values = self._seen.get(move.param), state.pop(move.param, None)
            for heir in move.heirs:
                if values is not None and before is not None and before.shape == heir.shape:
                    state[heir] = convert_states(values, before.dtype, heir)

    def accept(self, groups: Sequence[Group], moves: Sequence[Move]) -> None:
        """Record the parameters and modules as they are now. ``moves`` are those that :meth:`find` has returned."""
        if self._is_current:
            return
        places = self._places()
        for move in moves:
            if not move.members and move.param in places:
                self._vacant |= dict.fromkeys(places[move.param], move.group)
        for watch in self.watches:
            watch.refresh()
        self._vacant = {place: group for place, group in self._vacant.items() if place[1] not in place[0].places}
        self._seen = _descriptions(all_params(groups))

    def _look_into_modules(self, names: Mapping[Tensor, str], numbers: Mapping[Tensor, int]) -> list[Move]:
        """Return the moves of parameters that modules have replaced, removed, untied or set again."""
        now = {(watch, name): param for watch in self.watches for name, param in watch.current().items()}
        present = set(now.values())
        known = set(names)

        def adopted(places: Sequence[Place]) -> dict[Place, Tensor]:
            fresh = {}
            for place in places:
                if place in now and now[place] not in known:
                    known.add(now[place])
                    fresh[place] = now[place]
            return fresh

        moves = []
        for param, places in self._places().items():
            if param not in names:  # the optimizer does not have it
                continue
            fresh = adopted(places)
            if param in present:  # it was tied, and some of its places hold a new parameter
                moves += [self._untied(param, numbers[param], place, other) for place, other in fresh.items()]
            elif fresh:
                moves.append(self._replaced(param, names[param], numbers[param], fresh))
            else:
                others = [names.get(now[place], "another one") for place in places if place in now]
                before = self._seen.get(param)
                change = replacement(names[param], before, None, tied=others[0]) if others else None
                moves.append(Move(change or removal(names[param], before), numbers[param], param, {}))
        for place, number in self._vacant.items():
            for other in adopted([place]).values():
                change = replacement(f"parameter {self._name(place)!r}", None, Description.from_tensor(other))
                moves.append(Move(change, number, None, {place[1]: other}))
        return moves

    def _untied(self, param: Tensor, number: int, place: Place, other: Tensor) -> Move:
        name = f"parameter {self._name(place)!r}"
        change = replacement(name, self._seen.get(param), Description.from_tensor(other))
        return Move(change, number, param, {"": param, place[1]: other}, heirs=[param])

    def _replaced(self, param: Tensor, name: str, number: int, fresh: Mapping[Place, Tensor]) -> Move:
        members = {place[1]: other for place, other in fresh.items()}
        before = self._seen.get(param)
        if before is None:
            return Move(None, number, param, members)
        after = Description.from_tensor(next(iter(members.values())))
        heirs = [other for other in members.values() if _converted(param, other)]
        change = compare(name, before, after) if heirs else None
        return Move(change or replacement(name, before, after), number, param, members, heirs)

    def _places(self) -> dict[Tensor, list[Place]]:
        """Return the recorded places of each parameter in the watched modules."""
        places: dict[Tensor, list[Place]] = {}
        for watch in self.watches:
            for name, param in watch.places.items():
                places.setdefault(param, []).append((watch, name))
        return places

    def _name(self, place: Place) -> str:
        watch, name = place
        return name if len(self.watches) == 1 else f"{type(watch.module).__name__}.{name}"


def _descriptions(params: Sequence[Tensor]) -> dict[Tensor, Description]:
    return {param: Description.from_tensor(param) for param in params if has_memory(param)}


@contextmanager
def restored_on_error(groups: Sequence[Group], state: State) -> Iterator[None]:
    """Restore groups and states if the body of this context raises."""
    keys = ["params", "param_names"]
    lists = [{key: group[key] for key in keys if key in group} for group in groups]
    saved_state = dict(state)
    try:
        yield
    except BaseException:
        for group, saved in zip(groups, lists, strict=True):
            group.update(saved)
        state.clear()
        state.update(saved_state)
        raise


def _converted(old: Tensor, new: Tensor) -> bool:
    """Return True if a module converted its parameter (``.to(...)``, ``.half()``) into a new object.

    A module does so if ``p.data = ...`` is not possible between the old and the new kind of tensor, as between the CPU
    and some other devices, or if ``set_overwrite_module_params_on_conversion`` is set. A conversion is recognised by
    the values: they are the old ones, possibly rounded to a lower precision.
    """
    kinds = (new, torch.empty(0, device="cpu"))  # the model may have been on the CPU in between
    can_assign = shallow_copy_check()
    in_place = all(can_assign(old, kind) for kind in kinds)
    if old.shape != new.shape or (in_place and not torch.__future__.get_overwrite_module_params_on_conversion()):
        return False
    old, new = local_shard(old), local_shard(new)
    moved = old.to(new.device)
    ways = (new.dtype, torch.float16, torch.bfloat16, torch.float32)
    return any(torch.equal(moved.to(way).to(new.dtype), new) for way in ways)


def _splice(group: Group, param: Tensor | None, members: Mapping[str, Tensor]) -> None:
    """Replace a parameter by ``members``, or append them; the lists are replaced, so this can be reverted."""
    params, names = group["params"], group.get("param_names", ())
    start = next((i for i, other in enumerate(params) if other is param), len(params))
    stop = start + (param is not None)
    if len(names) == len(params) and names:
        kept = [names[start] if other is param else name for name, other in members.items()]
        group["param_names"] = [*names[:start], *kept, *names[stop:]]
    group["params"] = [*params[:start], *members.values(), *params[stop:]]
