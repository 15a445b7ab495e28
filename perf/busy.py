"""How much of the CPU others took while the report was running: with few cores, that spoils every number."""

from __future__ import annotations

import os
from pathlib import Path

STAT = Path("/proc/stat")
TOO_MUCH = 0.05


class Others:
    """Counts from when it is made. Knows nothing where there is no /proc/stat."""

    def __init__(self) -> None:
        self.began = self._seconds()

    @staticmethod
    def _seconds() -> tuple[float, float, float] | None:
        """The CPU seconds there were, those that were used, and those used by this process and its children."""
        try:
            numbers = [int(word) for word in STAT.read_text().splitlines()[0].split()[1:9]]
        except (OSError, ValueError, IndexError):
            return None
        user, nice, system, idle, waiting, irq, softirq, steal = numbers
        used = user + nice + system + irq + softirq + steal
        tick = os.sysconf("SC_CLK_TCK")
        return (used + idle + waiting) / tick, used / tick, sum(os.times()[:4])

    def note(self) -> list[str]:
        """A line for the reader if others took too much."""
        now = self._seconds()
        if now is None or self.began is None:
            return []
        there, used, own = (after - before for after, before in zip(now, self.began, strict=True))
        share = (used - own) / there if there > 0 else 0.0
        if share <= TOO_MUCH:
            return []
        return [f"BUSY: others took {share:.0%} of the CPU meanwhile; do not quote these numbers, run it again alone"]
