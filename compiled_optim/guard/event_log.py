"""Log and count the changes that an optimizer has followed. ``change`` defines the kinds of changes."""

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
    """The changes that one optimizer has followed, each with a count."""

    def __init__(self, optimizer: str) -> None:
        self._optimizer = optimizer
        self._counts: dict[tuple[str, ...], int] = {}
        self._texts: dict[tuple[str, ...], str] = {}
        self._dropped = 0

    def record(self, changes: Sequence[Change]) -> None:
        """Count changes that were followed in one step; log those that occur for the first time, in one line."""
        new = []
        for change in changes:
            key = change.identity
            if key not in self._counts and len(self._counts) >= MAX_EVENTS:
                self._dropped += 1
                continue
            self._counts[key] = self._counts.get(key, 0) + 1
            if key not in self._texts:
                self._texts[key] = str(change)
                new.append(str(change))
        if len(new) == 1:
            logger.warning("%s follows a reallocated parameter: %s", self._optimizer, new[0])
        elif new:
            rest = f"; and {len(new) - MAX_LISTED} more, see explain()" if len(new) > MAX_LISTED else ""
            listed = "; ".join(new[:MAX_LISTED]) + rest
            logger.warning("%s follows %d reallocated parameters: %s", self._optimizer, len(new), listed)

    def texts(self) -> tuple[str, ...]:
        """Return every event once, in the order of first occurrence, with its count if it is more than 1."""
        times = {key: f" (seen {count} times)" if count > 1 else "" for key, count in self._counts.items()}
        dropped = [f"... and {self._dropped} further events that are not kept"] if self._dropped else []
        return (*(text + times[key] for key, text in self._texts.items()), *dropped)
