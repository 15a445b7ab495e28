"""One race: the contenders step in turn, on copies of the same parameters and with the same gradients.

Each contender is first checked against a float64 reference, so that an optimizer that skips work is reported as an
error. New gradients are copied into the same buffers right before each step of each contender, because some optimizers
clear or modify them. Only the step is timed. If the workload is larger than the cache, the cache is evicted before the
step. Each round has another order.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch._dynamo
from torch import Tensor

import compiled_optim as co
from perf.cases import DTYPES, Case
from perf.check import flat, judge, reference, untouched
from perf.clock import Clock
from perf.contenders import BASELINES, CONTENDERS, OURS, Entrant, not_entered
from perf.memory import Memory, extra_bytes
from perf.noise import Noise
from perf.optimizers import RULES
from perf.report import Row, Spread
from perf.workloads import CHECKED_STEPS, WORKLOADS, elements

SLOW, SLOW_SECONDS, SLOW_TURN = 3.0, 0.05, 4
"""A contender slower than SLOW times the fastest one and than SLOW_SECONDS runs only in every SLOW_TURN-th round.

This does not apply to ours and to the baseline, because their ratio is the main result.
"""

WARM_STEPS = 3
"""The steps between the check and the first round: one measures memory, the others tell who is slow."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Length:
    """The length of a race: a number of rounds, or about ``seconds``.

    A race with fewer than ``least`` rounds after ``seconds`` continues for up to three times as long.
    """

    rounds: int | None = None
    seconds: float = 4.0
    least: int = 16
    most: int = 300

    def goes_on(self, done: int, started: float) -> bool:
        """Return whether another round is run."""
        if self.rounds is not None:
            return done < self.rounds
        seconds = self.seconds if done >= self.least else 3 * self.seconds
        return done < 3 or (done < self.most and time.perf_counter() - started < seconds)

    def fraction(self, done: int, started: float) -> float:
        """Return the fraction of the race that is done."""
        if self.rounds is not None:
            return done / self.rounds
        by_time = (time.perf_counter() - started) / self.seconds
        return min(1.0, max(done / self.most, min(by_time, done / self.least)))


@dataclass
class Lane:
    """A contender that passed the check, with its parameters and its times by round."""

    params: list[Tensor]
    entrant: Entrant
    turn: int = 1
    warm_seconds: float = float("inf")
    seconds: dict[int, float] = field(default_factory=dict)


class Race:
    """All contenders in one case. After an interruption, ``rows`` returns the results so far."""

    def __init__(
        self, case: Case, device: torch.device, memory: Memory, length: Length, asked: Collection[str] = ()
    ) -> None:
        self.case, self.device, self.memory, self.length = case, device, memory, length
        self.rule, self.dtype = RULES[case.optimizer], DTYPES[case.dtype]
        self.clock = Clock(device)
        self.workload = WORKLOADS[case.workload]
        shapes = self.workload.shapes
        size = elements(shapes)
        footprint = size * self.dtype.itemsize * (2 + self.rule.measured.states)
        self.in_cache = memory.fits(footprint)
        needed = self.rule.bytes_per_parameter(self.dtype.itemsize)
        row = Row(*(case.workload, case.optimizer, case.dtype, ""), len(shapes), size, needed, self.in_cache)
        row.about, row.present = self.workload.about, self.workload.present
        usual = [name for name, contender in CONTENDERS.items() if contender.stored is None or case.storages]
        self.results = {name: replace(row, contender=name, status="interrupted") for name in asked or usual}
        self.lanes: dict[str, Lane] = {}
        self.first_round = self.workload.untimed + WARM_STEPS + 1
        for name, result in self.results.items():
            if (why := not_entered(name, self.rule, device.type, len(shapes), bool(asked), case.dtype)) is not None:
                result.status, result.reason = why
            elif name in case.without and not asked:
                result.status, result.reason = "skipped", f"to save time: --workload {case.workload}"

    def run(self, progress: Progress) -> None:
        """Check all contenders, then time them in rounds. Results are kept if this is interrupted."""
        try:
            self.warm_up(progress)
            self._rounds(progress)
        finally:
            self._summarise()
            self.close()

    def close(self) -> None:
        """Release the parameters, and what torch.compile kept."""
        self.lanes.clear()
        torch._dynamo.reset()  # the recompiles of this race must not count toward the limit in the next

    def rows(self) -> list[Row]:
        """Return a row for each contender, in the order they were requested or of CONTENDERS."""
        return list(self.results.values())

    def warm_up(self, progress: Progress) -> None:
        """Check all contenders. Those that pass are in ``lanes``."""
        progress("preparing", 0.0)
        self.noise = Noise(self.workload.shapes, self.dtype, self.device)
        self.buffers = [torch.empty_like(value) for value in self.noise.window(0)]
        expected = reference(self.rule, self.noise, self.workload)
        for row in [row for row in self.results.values() if row.status == "interrupted"]:
            progress(f"checking {row.contender}", 0.1)
            try:
                self._enter(row, expected)
            except Exception as error:
                self._failed(row.contender, error)

    def _failed(self, name: str, error: Exception) -> None:
        """Record an exception as the result of a contender, and remove it from the race."""
        said = str(error).strip().splitlines() or [""]
        self.results[name].status, self.results[name].reason = "error", f"{type(error).__name__}: {said[0]}"
        self.lanes.pop(name, None)

    def _enter(self, row: Row, expected: Tensor) -> None:
        """Warm a contender up, and add it to the race if its first steps are correct."""
        began = time.perf_counter()
        params = self.noise.parameters(self.dtype)
        lane = Lane(params, CONTENDERS[row.contender].enter(self.rule, self.workload.grouped(params)))
        # beyond the recompile limit, torch.compile falls back to eager without an error
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            for step in range(1, 1 + self.workload.untimed):
                self.give_gradients(lane, step)
                lane.entrant.step()
                if step == CHECKED_STEPS:
                    row.warmup_seconds = time.perf_counter() - began
                row.reason = self._wrong(row, params, step, expected)
                if row.reason:
                    row.status = "error"
                    return
            self.give_gradients(lane, self.workload.untimed + 1)
            row.extra_bytes = extra_bytes(lane.entrant.step, self.device)
            for step in range(self.workload.untimed + 2, self.first_round):
                self.give_gradients(lane, step)
                lane.warm_seconds = min(lane.warm_seconds, self.clock.time(lane.entrant.step))
        if CONTENDERS[row.contender].stored is not None and isinstance(lane.entrant.optimizer, co.Optimizer):
            row.stored_bytes = moved_bytes(lane.entrant.optimizer)
        self.lanes[row.contender] = lane

    def _wrong(self, row: Row, params: list[Tensor], step: int, expected: Tensor) -> str:
        """Return what is wrong with the parameters after a step of the warm-up, or an empty string."""
        if step == 1 and self.workload.present < 1:
            starts = self.noise.cut(self.noise.start())
            if not untouched(starts, params, self.workload.with_gradients(step)):
                return "changed parameters that have no gradient"
        if step == self.workload.untimed:
            stored = CONTENDERS[row.contender].stored
            tolerance = None if stored is None else stored.tolerance
            row.deviation, reason = judge(self.noise.start(), flat(params), expected, tolerance)
            return reason
        return ""

    def give_gradients(self, lane: Lane, step: int) -> None:
        """Copy the gradients of a step into the buffers, and assign them to the parameters that have one."""
        torch._foreach_copy_(self.buffers, self.noise.window(step))
        present = self.workload.with_gradients(step)
        for param, buffer, given in zip(lane.params, self.buffers, present, strict=True):
            param.grad = buffer if given else None
        if not self.in_cache:
            self.memory.sweep()

    def timed_step(self, name: str, step: int) -> float | None:
        """Return the seconds of a step of a contender, or None if it is no longer in the race. Errors are recorded."""
        if (lane := self.lanes.get(name)) is None:
            return None
        self.give_gradients(lane, step)
        try:
            return self.clock.time(lane.entrant.step)
        except Exception as error:
            self._failed(name, error)
            return None

    def _rounds(self, progress: Progress) -> None:
        if not self.lanes:
            return
        fastest = min(lane.warm_seconds for lane in self.lanes.values())
        for name, lane in self.lanes.items():
            if name not in (OURS, baseline(self.lanes)) and lane.warm_seconds > max(SLOW * fastest, SLOW_SECONDS):
                lane.turn = SLOW_TURN
        first = self.workload.with_gradients(self.first_round)
        watched = max(place for place, given in enumerate(first) if given)
        before = {name: lane.params[watched].detach().clone() for name, lane in self.lanes.items()}
        started, done = time.perf_counter(), 0
        while self.length.goes_on(done, started):
            progress("racing", 0.2 + 0.8 * self.length.fraction(done, started))
            if not self.in_cache:
                self.memory.measure()  # under the current load of the machine
            for name, lane in random.Random(done).sample(list(self.lanes.items()), len(self.lanes)):
                turn = done % lane.turn == 0
                if turn and (seconds := self.timed_step(name, self.first_round + done)) is not None:
                    lane.seconds[done] = seconds
            done += 1
        for name, lane in self.lanes.items():
            if torch.equal(before[name], lane.params[watched]):
                self.results[name].status, self.results[name].reason = "error", "stopped stepping while it was timed"
                lane.seconds.clear()

    def _summarise(self) -> None:
        timed = {name: lane.seconds for name, lane in self.lanes.items() if lane.seconds}
        for name, seconds in timed.items():
            row = self.results[name]
            row.status, row.rounds, row.time = "ok", len(seconds), spread(seconds.values())
            row.baseline = baseline(timed)
            row.ratio = ratio(seconds, timed[row.baseline])
            if OURS in timed and CONTENDERS[name].stored is not None:
                row.to_plain = ratio(seconds, timed[OURS])


def baseline(names: Collection[str]) -> str:
    """Return the contender that is the baseline of the ratios."""
    return next(name for name in (*BASELINES, *names) if name in names)


def moved_bytes(optimizer: co.Optimizer) -> int:
    """Return the bytes that a step moves for a parameter: it reads everything and writes all but the gradients."""
    sizes = optimizer.explain().bytes_per_element
    return round(2 * sum(sizes.values()) - sizes["gradients"])


def spread(values: Collection[float]) -> Spread:
    """Return median and quartiles. For a single value, all three are that value."""
    values = list(values)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return Spread(median, low, high)


def ratio(seconds: Mapping[int, float], baseline: Mapping[int, float]) -> Spread | None:
    """Return median and quartiles of the ratios in the rounds that both ran in, or None if there is no such round."""
    ratios = [seconds[number] / baseline[number] for number in seconds if number in baseline]
    return spread(ratios) if ratios else None
