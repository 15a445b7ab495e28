"""Find what has changed since the last record: the memory of parameters, and what the watched modules hold."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import Tensor

from compiled_optim.engine.rule import Group, all_params
from compiled_optim.engine.tensor_types import has_memory
from compiled_optim.guard.change import Description, addition, compare, removal, replacement, tie
from compiled_optim.guard.conversions import find_conversions
from compiled_optim.guard.module_changes import Holders, Place, Places, compare_modules
from compiled_optim.guard.moves import Findings, Move
from compiled_optim.guard.names import follow_name, message_names, names_of, place_name
from compiled_optim.guard.record import Record, Vacancy


class Search:
    """Compares a record with the parameters in the groups, and with those that the watched modules hold ``now``."""

    def __init__(self, record: Record, groups: Sequence[Group], now: Places) -> None:
        self._record, self._groups = record, groups
        self._before, self._found = record.places(), now
        self._modules = record.submodules()
        self._converted = find_conversions(
            self._before, now, Holders(now, self._modules), {param for group in groups for param in group["params"]}
        )
        self._now = _with_originals(now, self._converted)
        named = [(group["params"], names_of(group) or ()) for group in groups]
        self._given = {param: name for params, names in named for param, name in zip(params, names, strict=False)}
        self._numbers = {param: number for number, group in enumerate(groups) for param in group["params"]}
        self._renamed = dict(self._find_renamed())
        names = message_names(groups, {**self._before, **self._now}, record.watches, self._renamed)
        self._names = dict(zip(all_params(groups), names, strict=True))

    def findings(self) -> Findings:
        """Return all that has changed."""
        vacant = [vacancy for vacancy in self._record.vacant if vacancy.group < len(self._groups)]
        holders = Holders(self._now, self._modules)
        places = [vacancy.places for vacancy in vacant]
        changes = compare_modules(self._before, self._now, holders, list(self._names), places)
        moves = [move for param, others in changes.replaced.items() for move in self._replaced(param, others)]
        moves += [self._removed(param, other) for param, other in changes.removed.items()]
        moves += [self._conversion(param, others) for param, others in self._converted.items() if param in self._names]
        moves += self._reallocated({move.param for move in moves if not move.stays})
        order: dict[Tensor | None, int] = {param: i for i, param in enumerate(self._names)}
        moves.sort(key=lambda move: order[move.param])
        moves += [self._set_again(param, vacant[number]) for param, number in changes.set_again.items()]
        added = [addition(self._quoted(param), _description(param)) for param in changes.added]
        vacant += [
            Vacancy(self._numbers[param], self._given.get(param), self._before[param]) for param in changes.removed
        ]
        vacant = [
            vacancy._replace(places=list(map(holders.without_gone, vacancy.places)))
            for vacancy in vacant
            if not any(map(holders.at, vacancy.places))
        ]
        return Findings(moves, self._renamed, added, vacant)

    def _find_renamed(self) -> Iterator[tuple[Tensor, str]]:
        """Yield the parameters that have a new name."""
        for param, name in self._given.items():
            before, now = self._before.get(param), self._now.get(param)
            if before is not None and now is not None and before != now:
                new = follow_name(name, before, now)
                if new is not None and new != name:
                    yield param, new

    def _replaced(self, param: Tensor, others: Sequence[Tensor]) -> list[Move]:
        """Return the moves of a parameter at whose places there are new ones."""
        before, number = self._record.seen.get(param), self._numbers[param]
        adopted = [(self._adopted_name(param, other, i == 0), other) for i, other in enumerate(others)]
        after = [_description(other) for other in others]
        if before is None:
            return [Move(None, number, param, param in self._now, adopted)]
        if param in self._now:  # it was tied
            changes = [
                replacement(self._quoted(other), before, [new]) for other, new in zip(others, after, strict=True)
            ]
            return [Move(change, number, param, True, [each]) for change, each in zip(changes, adopted, strict=True)]
        return [Move(replacement(self._names[param], before, after), number, param, False, adopted)]

    def _conversion(self, param: Tensor, others: Sequence[Tensor]) -> Move:
        """Return the move of a parameter that has become a new object, or several if it was tied."""
        name, before = self._names[param], self._record.seen.get(param)
        after = list(map(Description.from_tensor, others))
        change = None if before is None else compare(name, before, after[0]) or replacement(name, before, after)
        adopted = [(self._adopted_name(param, other, i == 0), other) for i, other in enumerate(others)]
        return Move(change, self._numbers[param], param, False, adopted, others)

    def _removed(self, param: Tensor, other: Tensor | None) -> Move:
        """Return the move of a parameter that is gone, and at whose place there is no new one."""
        name, before = self._names[param], self._record.seen.get(param)
        if other is None:
            change = removal(name, before)
        else:
            change = tie(name, before, self._names.get(other) or self._quoted(other), other in self._names)
        return Move(change, self._numbers[param], param)

    def _set_again(self, param: Tensor, vacancy: Vacancy) -> Move:
        """Return the move of a new parameter at a place where one had been removed."""
        group, given, before = vacancy
        name = None if given is None else follow_name(given, before, self._now[param])
        change = replacement(self._quoted(param), None, [_description(param)])
        return Move(change, group, None, adopted=[(name or self._name(param), param)])

    def _reallocated(self, gone: Collection[Tensor | None]) -> Iterator[Move]:
        """Yield the moves of parameters that stay, but in other memory or with other metadata."""
        for param, before in self._record.seen.items():
            if param in self._names and param not in gone:
                now = Description.from_tensor(param)
                change = None if now == before else compare(self._names[param], before, now)
                if change is not None:
                    yield Move(change, self._numbers[param], param, True, heirs=[param])

    def _adopted_name(self, param: Tensor, other: Tensor, is_first: bool) -> str:
        """Return the name of a new parameter in the group of the one it replaces."""
        given = self._given.get(param)
        if given is None:
            return self._name(other)
        name = follow_name(given, self._before[param], self._found[other])
        if name is None and is_first and param not in self._found and self._shares_place(param, other):
            return given  # a name that the user has chosen
        return name or self._name(other)

    def _shares_place(self, param: Tensor, other: Tensor) -> bool:
        """Return True if a new parameter is at a place of the old one, without being a part of a parametrization."""
        before = {(key, place.leaf) for place in self._before[param] for key in place.keys}
        return any((key, place.leaf) in before for place in self._found[other] for key in place.keys)

    def _name(self, param: Tensor) -> str:
        places = self._found if param in self._found else self._now
        return place_name(places[param][0], self._record.watches)

    def _quoted(self, param: Tensor) -> str:
        return f"parameter {self._name(param)!r}"


def _with_originals(now: Places, converted: Mapping[Tensor, Sequence[Tensor]]) -> Places:
    """Return the places of parameters, with a parameter instead of the new objects that it was converted into."""
    originals = {new: old for old, others in converted.items() for new in others}
    found: dict[Tensor, list[Place]] = {}
    for param, places in now.items():
        found.setdefault(originals.get(param, param), []).extend(places)
    return found


def _description(param: Tensor) -> Description | None:
    return Description.from_tensor(param) if has_memory(param) else None
