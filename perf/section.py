"""The parts of a rendered report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Section:
    """A title, a table, and lines below the table. ``topic`` is the part of the report that it belongs to."""

    title: str
    headers: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    lines: list[str] = field(default_factory=list)
    topic: str = ""
