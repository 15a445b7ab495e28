"""Record what an optimizer has seen of its parameters and of watched modules; find and follow what has changed since.

A parameter is tracked from the moment the optimizer gets it, or once it has memory if it is lazy or on the meta device.
That a parameter was replaced, removed or renamed can be seen only in a watched module.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

from compiled_optim.engine.rule import Group, all_params
from compiled_optim.engine.states import State
from compiled_optim.guard.change import Description
from compiled_optim.guard.moves import Findings, follow
from compiled_optim.guard.names import message_names
from compiled_optim.guard.record import Record, describe
from compiled_optim.guard.search import Search
from compiled_optim.guard.watch import Watch


class Tracker:
    """The record of one optimizer. It is replaced as a whole, so an interrupt leaves the old record or the new one."""

    def __init__(self, numbers: Collection[str]) -> None:
        """``numbers`` are the names of states that stay on the host, in their dtype."""
        self._numbers = numbers
        self.record = Record({}, (), ())

    def watch(self, module: nn.Module) -> None:
        """Watch a module; record its new parameters if it is watched already."""
        for watch in self.record.watches:
            if watch.module is module:
                watch.notice({param for param, _ in watch.read()} - {param for param, _ in watch.held})
                return
        self.record = self.record._replace(watches=(*self.record.watches, Watch(module)))

    def add(self, params: Sequence[Tensor]) -> None:
        """Start to track parameters."""
        for watch in self.record.watches:
            watch.notice({*params})
        self.record = self.record._replace(seen={**describe(params), **self.record.seen})

    def copy_from(self, original: Tracker, memo: dict[int, Any]) -> None:
        """Copy the record of the original for the parameters and modules in the ``memo`` of a deepcopy."""
        seen, watches, vacant = original.record
        watches = tuple(watch for watch in watches if id(watch.module) in memo)
        vacant = [each for each in vacant if all(id(place.module) in memo for place in each.places)]
        watches, vacant = copy.deepcopy((watches, vacant), memo)
        twins = {param: memo[id(param)] for param in seen if id(param) in memo}
        self.record = Record(
            {twin: _copied_description(seen[param], param, twin) for param, twin in twins.items()}, watches, vacant
        )

    def note_addresses(self, params: Sequence[Tensor]) -> None:
        """Record the addresses of parameters that this package has moved, which is not a change."""
        seen = self.record.seen
        moved = {param: seen[param]._replace(address=param.data_ptr()) for param in params if param in seen}
        self.record = self.record._replace(seen={**seen, **moved})

    def modules_unchanged(self) -> bool:
        """Return True if the watched modules hold the same parameters. The guard checks the memory of parameters."""
        for watch in self.record.watches:  # noqa: SIM110 -- every step calls this, and all() is slower
            if not watch.holds():
                return False
        return True

    def names(self, groups: Sequence[Group]) -> list[str]:
        """Return the names of all parameters for messages: the name if known, else the group and the index."""
        return message_names(groups, self.record.places(), self.record.watches, {})

    def find(self, groups: Sequence[Group]) -> Findings:
        """Return what has changed since parameters and modules were last recorded."""
        if not self.modules_unchanged():
            now = self.record.current_places()
        elif describe(all_params(groups)) != self.record.seen:
            now = self.record.places()
        else:
            return Findings(is_empty=True)
        return Search(self.record, groups, now).findings()

    def apply(self, groups: Sequence[Group], state: State, found: Findings) -> None:
        """Update the groups, and convert the states. A parameter whose shape changed gets a new state."""
        follow(groups, state, found, self.record.seen, self._numbers)

    def accept(self, groups: Sequence[Group], found: Findings) -> None:
        """Record the parameters and modules as they are now. ``found`` was followed."""
        if found.is_empty:
            return
        watches = [watch if watch.holds() else Watch(watch.module, watch.held) for watch in self.record.watches]
        self.record = Record(describe(all_params(groups)), watches, found.vacant)


def _copied_description(seen: Description, original: Tensor, twin: Tensor) -> Description:
    """Return what a copy of a tracker has seen of a copied parameter.

    A change of the original that is not followed yet stays one. A copy has other memory, and other strides if the
    original is not dense, which is no change.
    """
    now, own = Description.from_tensor(original), Description.from_tensor(twin)
    kept = (old if old != current else copied for old, current, copied in zip(seen, now, own, strict=True))
    return Description._make(kept)._replace(address=own.address)
