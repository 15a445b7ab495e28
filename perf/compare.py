"""Compare two reports: list the changes that are larger than the spread of both."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from perf.report import Report, Row

MATTERS = ("cpu", "threads", "torch", "device", "peers")
"""The keys of ``Report.machine`` that must be equal for two reports to be comparable."""

ENOUGH = 8
"""The fewest rounds whose quartiles are used as the spread."""


def compare(old: Report, new: Report) -> str:
    """Return a text that lists the rows that became faster or slower, and those that cannot be compared."""
    lines = [f"Compared with the report of {old.date}:"]
    lines += [
        f"  {what} differs: {old.machine.get(what, '?')} then, {new.machine.get(what, '?')} now"
        for what in MATTERS
        if old.machine.get(what) != new.machine.get(what)
    ]
    before = {row.key: row for row in old.rows}
    both = [(before[row.key], row) for row in new.rows if row.key in before]
    measured = [(was, now) for was, now in both if was.time is not None and now.time is not None]
    changed = [cells for was, now in measured if (cells := _change(was, now)) is not None]
    if changed:
        headers = ("workload", "optimizer", "dtype", "contender", "ms then", "ms now", "ratio then", "ratio now", "")
        lines.append(tabulate(changed, headers=headers, disable_numparse=True))
    lines.append(f"  {len(changed)} of {len(measured)} rows measured in both changed beyond the spread.")
    few = sum(min(was.rounds, now.rounds) < ENOUGH for was, now in measured)
    lines += [f"  {few} rows have fewer than {ENOUGH} rounds, too few to tell."] if few else []
    lines += [line for line in [_yardsticks(measured)] if line is not None]
    lines += [
        f"  {' '.join(now.key)}: {was.status} then, {now.status} now" for was, now in both if was.status != now.status
    ]
    only = [
        ("then", before.keys() - {row.key for row in new.rows}),
        ("now", {row.key for row in new.rows} - before.keys()),
    ]
    lines += [f"  only in the report of {when}: {len(keys)} rows" for when, keys in only if keys]
    return "\n".join(lines)


def _change(was: Row, now: Row) -> list[str] | None:
    """Return a table row if the quartiles of the two ratios to the baseline do not overlap, otherwise None.

    Ratios are compared instead of times, because a change in the speed of the machine affects all contenders. Rows with
    fewer than ENOUGH rounds are not compared, because their quartiles do not measure the spread.
    """
    assert was.time is not None
    assert now.time is not None
    if was.ratio is None or now.ratio is None or was.baseline != now.baseline or min(was.rounds, now.rounds) < ENOUGH:
        return None
    if was.ratio.low <= now.ratio.high and now.ratio.low <= was.ratio.high:
        return None
    factor = was.ratio.median / now.ratio.median
    verdict = f"{factor:.2f}× faster" if factor > 1 else f"{1 / factor:.2f}× slower"
    times = was.time.milliseconds(), now.time.milliseconds()
    return [*now.key, *times, was.ratio.plain(), now.ratio.plain(), verdict]


def _yardsticks(measured: Sequence[tuple[Row, Row]]) -> str | None:
    """Return a line on how the times of the baselines changed, or None if no baseline is in both reports."""
    moved = [
        now.time.median / was.time.median
        for was, now in measured
        if was.time is not None and now.time is not None and now.contender == now.baseline == was.baseline
    ]
    if not moved:
        return None
    return f"  The baselines took {min(moved):.2f} to {max(moved):.2f} times as long as then; that is the machine."
