"""The sections on storage: the step time and the memory of AdamW with each way to store parameters and states."""

from __future__ import annotations

from perf.contenders import CONTENDERS, OURS
from perf.report import MemoryRow, Report
from perf.section import Section


def storage_section(report: Report) -> Section:
    """Return the step times of the races that compare storages, beside those of ours and the baseline."""
    rows = []
    baselines = set()
    for race in report.races():
        if not any(row.to_plain for row in race):
            continue
        for row in race:
            if row.time is None or not (row.to_plain or row.contender in (OURS, row.baseline)):
                continue
            baselines.add(row.baseline)
            limit = report.limit(row)
            rows.append([
                row.workload,
                row.dtype,
                row.contender,
                row.time.milliseconds(),
                row.ratio.plain() if row.ratio is not None else "",
                row.to_plain.plain() if row.to_plain is not None else "",
                str(row.moved_bytes) if _bytes_are_known(row.contender) else "",
                f"{limit / row.time.median:.0%}" if limit is not None and _bytes_are_known(row.contender) else "",
                str(row.rounds),
            ])  # fmt: skip
    headers = (
        "workload",
        "dtype",
        "contender",
        "ms",
        f"/ {' or '.join(sorted(baselines))}",
        f"/ {OURS}",
        "B to move",
        "of limit",
        "rounds",
    )
    return Section("Storage: a step of AdamW", headers, rows, topic="storage")


def _bytes_are_known(contender: str) -> bool:
    """Return False for other packages with a storage of their own: the bytes that they move are not known here."""
    made = CONTENDERS[contender]
    return made.stored is None or made.package is None


def memory_section(report: Report) -> Section:
    """Return the memory of each storage, in bytes for each parameter."""
    rows = [
        [
            row.workload,
            row.contender,
            row.dtype,
            _size(row.buffers.get("weights", 0.0)),
            _size(row.buffers.get("gradients", 0.0)),
            _size(row.states),
            _size(row.step),
            _size(row.total),
            f"{row.total * row.parameters / 1e6:.0f}",
            ", ".join(f"{name} {_size(size)}" for name, size in states(row).items()),
        ]
        for row in report.memory
        if row.status == "ok"
    ]
    headers = (
        "workload",
        "contender",
        "weights in",
        "weights",
        "gradients",
        "states",
        "a step adds",
        "peak",
        "peak MB",
        "each state",
    )
    lines = [f"{row.status}: {row.contender} ({row.reason})" for row in report.memory if row.status != "ok"]
    return Section("Memory of AdamW: bytes for each parameter", headers, rows, lines, topic="memory")


def states(row: MemoryRow) -> dict[str, float]:
    """Return the sizes of the states alone, by name."""
    return {name: size for name, size in row.buffers.items() if name not in ("weights", "gradients")}


def _size(value: float) -> str:
    return f"{value:.2f}"
