"""Measure how step times change with the number of threads: ours and torch's fused step in turn, with each number.

The number of threads changes in one process, between steps. The first step after a change is not timed, because it
starts the threads. The number is restored at the end.
"""

from __future__ import annotations

import random
import time

import torch

from perf.cases import Case
from perf.contenders import OURS
from perf.memory import Memory
from perf.race import Length, Progress, Race, ratio, spread
from perf.report import ThreadRow

OPTIMIZER, BASELINE = "AdamW", "torch fused"


def thread_counts(most: int) -> list[int]:
    """Return 1, 2, 4 and so on, and the largest number."""
    return sorted({2**power for power in range(most.bit_length())} | {most})


class Scaling:
    """The step times of one workload with each number of threads. After an interruption, ``rows`` returns the rest."""

    def __init__(self, workload: str, memory: Memory, length: Length) -> None:
        self.race = Race(Case(workload, OPTIMIZER), torch.device("cpu"), memory, length, [OURS, BASELINE])
        self.counts = thread_counts(torch.get_num_threads())
        self.seconds: dict[tuple[str, int], dict[int, float]] = {}

    def run(self, progress: Progress) -> None:
        """Check the contenders, then time them in rounds, and restore the number of threads."""
        before = torch.get_num_threads()
        try:
            self.race.warm_up(progress)
            self._rounds(progress)
        finally:
            torch.set_num_threads(before)
            self.race.close()

    def _rounds(self, progress: Progress) -> None:
        race, length = self.race, self.race.length
        first = race.first_round
        started, done = time.perf_counter(), 0
        while race.lanes and length.goes_on(done, started):
            progress("racing", 0.2 + 0.8 * length.fraction(done, started))
            pairs = [(name, count) for name in race.lanes for count in self.counts]
            for name, count in random.Random(done).sample(pairs, len(pairs)):
                torch.set_num_threads(count)
                for step in (first + 2 * done, first + 2 * done + 1):  # of these, only the second is kept
                    if (seconds := race.timed_step(name, step)) is not None:
                        self.seconds.setdefault((name, count), {})[done] = seconds
            done += 1

    def errors(self) -> list[str]:
        """Return a line for each contender that could not be measured."""
        return [
            f"thread scaling of {row.workload}: {row.contender}: {row.reason}"
            for row in self.race.rows()
            if row.status == "error"
        ]

    def rows(self) -> list[ThreadRow]:
        """Return a row for each contender and number of threads that has times."""
        return [
            ThreadRow(
                self.race.case.workload,
                OPTIMIZER,
                name,
                count,
                len(seconds),
                spread(seconds.values()),
                ratio(seconds, self.seconds.get((name, 1), {})),
                BASELINE,
                ratio(seconds, self.seconds.get((BASELINE, count), {})),
            )
            for (name, count), seconds in sorted(self.seconds.items())
            if self.race.results[name].status != "error"
        ]
