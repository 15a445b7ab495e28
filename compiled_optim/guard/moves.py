"""Follow what has changed: replace, remove and rename parameters in the groups, and convert their states."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from torch import Tensor

from compiled_optim.engine.rule import Group
from compiled_optim.engine.states import State, convert_states
from compiled_optim.guard.change import Change, Description
from compiled_optim.guard.check import same_objects
from compiled_optim.guard.names import names_of
from compiled_optim.guard.record import Vacancy

LISTS = ("params", "param_names")
"""The keys of a group that the guard changes."""


@dataclass(frozen=True)
class Move:
    """How the optimizer follows the change of one parameter.

    ``stays`` is True if the parameter stays in its group. ``adopted`` are new parameters, each with its name, that come
    after it there or take its place. ``heirs`` take over its state, converted; without heirs, a parameter that stays
    keeps its state. ``param`` is None for a parameter that is set again after it was removed. ``change`` is None if the
    parameter had no memory before.
    """

    change: Change | None
    group: int
    param: Tensor | None
    stays: bool = False
    adopted: Sequence[tuple[str, Tensor]] = ()
    heirs: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Findings:
    """All that has changed: the moves to follow, new names of parameters, and parameters that were added to modules.

    ``vacant`` are all removed parameters at whose places there is none. ``is_empty`` is True if nothing has changed.
    """

    moves: Sequence[Move] = ()
    renamed: Mapping[Tensor, str] = field(default_factory=dict)
    added: Sequence[Change] = ()
    vacant: Sequence[Vacancy] = ()
    is_empty: bool = False

    @property
    def changes(self) -> list[Change]:
        """The changes of the parameters of the optimizer."""
        return [move.change for move in self.moves if move.change is not None]


def follow(
    groups: Sequence[Group],
    state: State,
    found: Findings,
    seen: Mapping[Tensor, Description],
    numbers: Collection[str],
) -> None:
    """Update the groups, and convert the states. A parameter whose shape changed gets a new state.

    ``seen`` describes the parameters before they changed. States with the names ``numbers`` are not converted. Lists
    and states are replaced, not edited, so that :class:`Saved` can restore the old ones.
    """
    moves: dict[Tensor | None, list[Move]] = {}
    for move in found.moves:
        moves.setdefault(move.param, []).append(move)
    for number, group in enumerate(groups):
        _update_lists(group, moves, [move for move in moves.get(None, ()) if move.group == number], found.renamed)
    for move in found.moves:
        if move.param is None or (move.stays and not move.heirs):
            continue
        before, values = seen.get(move.param), state.pop(move.param, None)
        for heir in move.heirs:
            if values is not None and before is not None and before.shape == heir.shape:
                state[heir] = convert_states(values, before.dtype, heir, numbers)


def _update_lists(
    group: Group, moves: Mapping[Tensor | None, Sequence[Move]], appended: Sequence[Move], renamed: Mapping[Tensor, str]
) -> None:
    """Update ``params`` and ``param_names`` of a group; ``appended`` are moves of parameters at its end."""
    names = names_of(group)
    members: list[tuple[str, Tensor]] = []
    for param, name in zip(group["params"], repeat("") if names is None else names, strict=False):
        own = moves.get(param, ())
        if all(move.stays for move in own):
            members.append((renamed.get(param, name), param))
        members += [member for move in own for member in move.adopted]
    members += [member for move in appended for member in move.adopted]
    params = [param for _, param in members]
    if not same_objects(params, group["params"]):
        group["params"] = params
    if names is not None:
        group["param_names"] = [name for name, _ in members]


class Saved:
    """The groups and states of an optimizer at one time, to restore them if a step cannot be made.

    Tensors are not copied, because nothing writes to them before the step runs.
    """

    def __init__(self, groups: Sequence[Group], state: State) -> None:
        self._lists = [(group, {key: group[key] for key in LISTS if key in group}) for group in groups]
        self._state = state
        self._values = {
            key: (values, dict(values) if isinstance(values, dict) else None) for key, values in state.items()
        }

    def restore(self) -> None:
        """Restore all of it. The dicts stay the same objects."""
        for group, lists in self._lists:
            group.update(lists)
        self._state.clear()
        for key, (values, content) in self._values.items():
            if content is not None:
                values.clear()
                values.update(content)
            self._state[key] = values
