"""What the guard saw: logged when it is seen for the first time, counted after that."""

from __future__ import annotations

import logging

from compiled_optim.change import Change

logger = logging.getLogger("compiled_optim")


def counted(number: int, thing: str) -> str:
    """So many things, in words for a person."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


class Events:
    """The changes an optimizer has followed."""

    def __init__(self, optimizer: str) -> None:
        self._optimizer = optimizer
        self._counts: dict[tuple[str, ...], int] = {}
        self._texts: dict[tuple[str, ...], str] = {}

    def tell(self, change: Change) -> None:
        """Take note of a change that was followed."""
        key = change.identity
        self._counts[key] = self._counts.get(key, 0) + 1
        if key not in self._texts:
            self._texts[key] = str(change)
            logger.warning("%s follows a reallocated parameter: %s", self._optimizer, change)

    def told(self) -> tuple[str, ...]:
        """Every event once, in the order they were first seen, with how often if more than once."""
        times = {key: f" (seen {count} times)" if count > 1 else "" for key, count in self._counts.items()}
        return tuple(text + times[key] for key, text in self._texts.items())
