"""What a run of the report found, and how it is kept as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1


class BadInput(Exception):
    """Something the user asked for cannot be done; the message is one line for them."""


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    def milliseconds(self) -> str:
        """Median and quartiles of a time for a table."""
        return f"{brief(self.median * 1e3)} ({brief(self.low * 1e3)}–{brief(self.high * 1e3)})"

    def plain(self) -> str:
        """Median and quartiles of a ratio for a table."""
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def brief(value: float) -> str:
    """A number with about three digits."""
    places = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{places}f}"


@dataclass
class Row:
    """One contender in one race.

    ``status`` is "ok", "error" (it failed, or computed something else), "absent" (not installed), "none" (there is no
    such implementation), "skipped" or "interrupted"; ``reason`` says more. Times are in seconds. ``ratio`` is to the
    ``baseline``, of rounds in which both took part. ``deviation`` is how far its first steps were from those of the
    float64 reference, relative to their length.
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

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What makes it the same row in another report."""
        return self.workload, self.optimizer, self.dtype, self.contender


@dataclass
class FirstStep:
    """What the first step of one optimizer cost, in a process of its own."""

    contender: str
    workload: str
    situation: str
    seconds: float
    graphs: int
    kernels: int | None
    calls_per_step: int | None
    recompiles: int


@dataclass
class Report:
    """Everything a run found. ``machine`` is for the reader and for telling whether two reports can be compared."""

    machine: dict[str, str]
    command: str
    date: str
    bytes_per_second: float = 0.0
    passes: int = 0
    interrupted: bool = False
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    first_steps: list[FirstStep] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def limit(self, row: Row) -> float | None:
        """The least seconds in which the memory could move what the rule needs; None where the cache takes part."""
        if row.in_cache or not self.bytes_per_second:
            return None
        return row.bytes_per_parameter * row.parameters / self.bytes_per_second

    def races(self) -> list[list[Row]]:
        """The rows of each race together, in the order they were run."""
        races: dict[tuple[str, str, str], list[Row]] = {}
        for row in self.rows:
            races.setdefault(row.key[:3], []).append(row)
        return list(races.values())

    def save(self, path: Path) -> None:
        """Write the report as JSON."""
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read a report, or say in one line why it cannot be read."""
        try:
            content = json.loads(path.read_text())
            if content.pop("format") != FORMAT:
                raise BadInput(f"{path} was written by another version of this report")
            content["rows"] = [_row(row) for row in content["rows"]]
            content["first_steps"] = [FirstStep(**first) for first in content["first_steps"]]
            return cls(**content)
        except OSError as error:
            raise BadInput(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BadInput(f"{path} is not a report written by --json") from None


def _row(content: dict[str, Any]) -> Row:
    spreads = {key: Spread(**content[key]) for key in ("time", "ratio") if content[key] is not None}
    return Row(**{**content, **spreads})
