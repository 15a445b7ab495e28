"""Log and count the changes that an optimizer has found. ``change`` defines the kinds of changes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from compiled_optim.guard.change import Change

logger = logging.getLogger("compiled_optim")


MAX_EVENTS = 1000
"""How many different events are kept; of later ones only the number."""

MAX_LISTED = 3
"""How many changes one log line spells out."""


class EventLog:
    """The changes that one optimizer has found, each with a count."""

    def __init__(self, optimizer: str) -> None:
        self._optimizer = optimizer
        self._counts: dict[tuple[str, ...], int] = {}
        self._texts: dict[tuple[str, ...], str] = {}
        self._dropped = 0

    def record(self, changes: Sequence[Change], added: Sequence[Change]) -> None:
        """Count changes that were followed in one step, and parameters that were added to a watched module.

        Those that occur for the first time are logged, in one line for each of both.
        """
        self._count(changes, "follows a reallocated parameter", "follows %d reallocated parameters")
        self._count(
            added,
            "does not step a new parameter, pass it to add_param_group()",
            "does not step %d new parameters, pass them to add_param_group()",
        )

    def _count(self, changes: Sequence[Change], one: str, several: str) -> None:
        """Count changes and log the new ones. Once ``MAX_EVENTS`` are kept, others are counted but not logged."""
        new: list[str] = []
        dropped = 0
        for change in changes:
            key = change.identity
            if key in self._counts:
                self._counts[key] += 1
            elif len(self._counts) < MAX_EVENTS:
                self._counts[key] = 1
                self._texts[key] = str(change)
                new.append(str(change))
            else:
                dropped += 1
        self._dropped += dropped
        if new:
            number = len(new) + dropped
            what = one if number == 1 else several % number
            rest = f"; and {number - MAX_LISTED} more, see explain()" if number > MAX_LISTED else ""
            logger.warning("%s %s: %s", self._optimizer, what, "; ".join(new[:MAX_LISTED]) + rest)

    def texts(self) -> tuple[str, ...]:
        """Return every event once, in the order of first occurrence, with its count if it is more than 1."""
        times = {key: f" (seen {count} times)" if count > 1 else "" for key, count in self._counts.items()}
        dropped = [f"... and {self._dropped} further events that are not kept"] if self._dropped else []
        return (*(text + times[key] for key, text in self._texts.items()), *dropped)
