"""The results of a run, and their JSON format."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1


class BadInput(Exception):
    """The user's input is invalid. The message is one line for the user."""


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    def milliseconds(self) -> str:
        """Return median and quartiles in milliseconds, formatted for a table."""
        return f"{brief(self.median * 1e3)} ({brief(self.low * 1e3)}–{brief(self.high * 1e3)})"

    def seconds(self) -> str:
        """Return median and quartiles in seconds, formatted for a table."""
        return f"{brief(self.median)} ({brief(self.low)}–{brief(self.high)})"

    def plain(self) -> str:
        """Return median and quartiles of a ratio, formatted for a table."""
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def brief(value: float) -> str:
    """Format a number with about three significant digits."""
    places = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{places}f}"


@dataclass
class Row:
    """The result of one contender in one race.

    ``status`` is "ok", "error" (an exception or a wrong result), "absent" (not installed), "none" (the implementation
    does not exist), "skipped" or "interrupted"; ``reason`` gives details. Times are in seconds. ``ratio`` is the time
    divided by that of ``baseline``, over the rounds that both ran in. ``deviation`` is the difference of the first
    steps from the float64 reference, relative to the length of the steps. ``about`` describes groups and gradients;
    ``present`` is the share of the tensors that have gradients in a step. ``to_plain`` is given for a contender that
    differs from ours in its storage: the time divided by that of ours without this storage. ``stored_bytes`` are the
    bytes that a step moves with a storage of its own, in place of ``bytes_per_parameter``.
    """

    workload: str
    optimizer: str
    dtype: str
    contender: str
    tensors: int
    parameters: int
    bytes_per_parameter: int
    in_cache: bool
    status: str = "ok"
    reason: str = ""
    rounds: int = 0
    time: Spread | None = None
    baseline: str = ""
    ratio: Spread | None = None
    warmup_seconds: float | None = None
    deviation: float | None = None
    extra_bytes: int | None = None
    about: str = ""
    present: float = 1.0
    to_plain: Spread | None = None
    stored_bytes: int | None = None

    @property
    def stepped(self) -> float:
        """The number of parameters that a step changes."""
        return self.parameters * self.present

    @property
    def moved_bytes(self) -> int:
        """The bytes that a step has to move for each parameter."""
        return self.bytes_per_parameter if self.stored_bytes is None else self.stored_bytes

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The fields that identify this row in another report."""
        return self.workload, self.optimizer, self.dtype, self.contender


@dataclass
class FirstStep:
    """The cost of the first step of one contender, measured in a separate process."""

    contender: str
    workload: str
    situation: str
    seconds: float
    graphs: int
    kernels: int | None
    calls_per_step: int | None
    recompiles: int


@dataclass
class ThreadRow:
    """The step time of one contender with a number of threads.

    ``to_one_thread`` is the time divided by that with one thread, ``ratio`` by that of ``baseline`` with as many
    threads, each in the same round.
    """

    workload: str
    optimizer: str
    contender: str
    threads: int
    rounds: int
    time: Spread
    to_one_thread: Spread | None
    baseline: str
    ratio: Spread | None


@dataclass
class NewProcess:
    """The first step in new processes that find compiled code on disk.

    ``import_torch`` is the time to import torch, ``until_stepped`` the time from there to the end of the first step, in
    seconds. ``imported`` lists the parts of the compiler that were imported by then.
    """

    contender: str
    workload: str
    processes: int
    import_torch: Spread
    until_stepped: Spread
    imported: list[str]


@dataclass
class HostCost:
    """The time of one call of a contender in a process that has compiled its code, and the ratio to the baseline."""

    what: str
    contender: str
    rounds: int
    time: Spread
    baseline: str
    ratio: Spread | None


@dataclass
class MemoryRow:
    """The memory of one contender for one workload, in bytes for each parameter, measured in a separate process.

    ``buffers`` has weights, gradients and each state by name. ``step`` is the peak of a step above what was there
    before, by the allocations of torch or by the resident memory of the process, whichever is larger. ``largest``
    is the size of the largest parameter, to compare ``step`` with. ``status`` is "ok", "error" or "absent"; ``reason``
    gives details.
    """

    workload: str
    contender: str
    dtype: str
    parameters: int
    status: str = "ok"
    reason: str = ""
    buffers: dict[str, float] = field(default_factory=dict)
    step: float = 0.0
    largest: float = 0.0

    @property
    def states(self) -> float:
        """The bytes of all states."""
        return sum(size for name, size in self.buffers.items() if name not in ("weights", "gradients"))

    @property
    def total(self) -> float:
        """The bytes at the peak of a step."""
        return sum(self.buffers.values()) + self.step


@dataclass
class Report:
    """The results of a run. ``machine`` describes the environment; ``compare`` uses it to check comparability."""

    machine: dict[str, str]
    command: str
    date: str
    bytes_per_second: float = 0.0
    passes: int = 0
    interrupted: bool = False
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    scaling: list[ThreadRow] = field(default_factory=list)
    first_steps: list[FirstStep] = field(default_factory=list)
    new_processes: list[NewProcess] = field(default_factory=list)
    host_costs: list[HostCost] = field(default_factory=list)
    memory: list[MemoryRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def limit(self, row: Row) -> float | None:
        """Return the least seconds of a step at the measured bandwidth, or None if ``row.in_cache``."""
        if row.in_cache or not self.bytes_per_second:
            return None
        return row.moved_bytes * row.stepped / self.bytes_per_second

    def usual_limit(self, race: Sequence[Row]) -> float | None:
        """Return the limit of a race for contenders without a storage of their own."""
        return self.limit(next((row for row in race if row.stored_bytes is None), race[0]))

    def races(self) -> list[list[Row]]:
        """Return the rows grouped by race, in the order of the run."""
        races: dict[tuple[str, str, str], list[Row]] = {}
        for row in self.rows:
            races.setdefault(row.key[:3], []).append(row)
        return list(races.values())

    def save(self, path: Path) -> None:
        """Write the report as JSON."""
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read a report. Raise BadInput if it cannot be read."""
        try:
            content = json.loads(path.read_text())
            if content.pop("format") != FORMAT:
                raise BadInput(f"{path} was written by another version of this report")
            for name, kind in KINDS.items():
                content[name] = [kind(**_spreads(row)) for row in content.get(name, [])]
            return cls(**content)
        except OSError as error:
            raise BadInput(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BadInput(f"{path} is not a report written by --json") from None


KINDS: dict[str, Callable[..., Any]] = {
    "rows": Row,
    "scaling": ThreadRow,
    "first_steps": FirstStep,
    "new_processes": NewProcess,
    "host_costs": HostCost,
    "memory": MemoryRow,
}
"""The lists of a report and the type of their elements."""


def _spreads(content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an element, with the objects in it converted to Spread."""
    return {name: Spread(**value) if _is_spread(value) else value for name, value in content.items()}


def _is_spread(value: object) -> bool:
    return isinstance(value, dict) and value.keys() == Spread.__dataclass_fields__.keys()
