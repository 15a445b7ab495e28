"""Measure the CPU time that other processes use during a run. On few cores it distorts the results."""

from __future__ import annotations

import os
from pathlib import Path

STAT = Path("/proc/stat")
TOO_MUCH = 0.05


class Others:
    """Count the CPU time of other processes from construction on. Without /proc/stat it reports nothing."""

    def __init__(self) -> None:
        self.began = self._seconds()

    @staticmethod
    def _seconds() -> tuple[float, float, float] | None:
        """Return the total CPU seconds, the busy ones, and those used by this process and its children."""
        try:
            numbers = [int(word) for word in STAT.read_text().splitlines()[0].split()[1:9]]
        except (OSError, ValueError, IndexError):
            return None
        user, nice, system, idle, waiting, irq, softirq, steal = numbers
        used = user + nice + system + irq + softirq + steal
        tick = os.sysconf("SC_CLK_TCK")
        return (used + idle + waiting) / tick, used / tick, sum(os.times()[:4])

    def note(self) -> list[str]:
        """Return a warning line if other processes used more than TOO_MUCH of the CPU."""
        now = self._seconds()
        if now is None or self.began is None:
            return []
        there, used, own = (after - before for after, before in zip(now, self.began, strict=True))
        share = (used - own) / there if there > 0 else 0.0
        if share <= TOO_MUCH:
            return []
        return [f"BUSY: others took {share:.0%} of the CPU meanwhile; do not quote these numbers, run it again alone"]
