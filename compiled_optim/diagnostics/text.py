"""Small helpers for messages."""

from __future__ import annotations

from collections.abc import Sequence

MAX_NAMES = 3
"""The number of parameters that a message names. The others are counted."""


def counted(number: int, thing: str) -> str:
    """Return a number with its noun: "1 unit", "2 units"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def name_some(names: Sequence[str]) -> str:
    """Return the number of parameters and the names of the first ones."""
    if len(names) == 1:
        return names[0]
    rest = len(names) - MAX_NAMES
    listed = ", ".join(name.removeprefix("parameter ") for name in names[:MAX_NAMES])
    return f"{len(names)} parameters ({listed}{f' and {rest} more' if rest > 0 else ''})"
