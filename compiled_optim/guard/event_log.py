"""Log and count the changes that an optimizer has followed. ``change`` defines the kinds of changes."""

from __future__ import annotations

import logging

from compiled_optim.guard.change import Change

logger = logging.getLogger("compiled_optim")


class EventLog:
    """The changes that one optimizer has followed, each with a count."""

    def __init__(self, optimizer: str) -> None:
        self._optimizer = optimizer
        self._counts: dict[tuple[str, ...], int] = {}
        self._texts: dict[tuple[str, ...], str] = {}

    def record(self, change: Change) -> None:
        """Count a change; log it the first time it occurs."""
        key = change.identity
        self._counts[key] = self._counts.get(key, 0) + 1
        if key not in self._texts:
            self._texts[key] = str(change)
            logger.warning("%s follows a reallocated parameter: %s", self._optimizer, change)

    def texts(self) -> tuple[str, ...]:
        """Return every event once, in the order of first occurrence, with its count if it is more than 1."""
        times = {key: f" (seen {count} times)" if count > 1 else "" for key, count in self._counts.items()}
        return tuple(text + times[key] for key, text in self._texts.items())
