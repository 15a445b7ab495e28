"""What changed since another report, beyond the spread that both print."""

from __future__ import annotations

from tabulate import tabulate

from perf.report import Report, Row

MATTERS = ("cpu", "threads", "torch", "device", "peers")
"""What must be equal for two reports to be about the same thing."""


def compare(old: Report, new: Report) -> str:
    """Say which rows are faster or slower than before, and which cannot be compared."""
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
    """A table row if the ratio to the baseline changed, or for the baseline itself its time; None otherwise.

    Changed means that the quartiles do not overlap. The ratio is what is compared, because a busy machine slows down
    everybody.
    """
    assert was.time is not None
    assert now.time is not None
    same_baseline = was.baseline == now.baseline and was.ratio is not None and now.ratio is not None
    if same_baseline and now.contender != now.baseline:
        assert was.ratio is not None
        assert now.ratio is not None
        then, today = was.ratio, now.ratio
    else:
        then, today = was.time, now.time
    if then.low <= today.high and today.low <= then.high:
        return None
    factor = then.median / today.median
    verdict = f"{factor:.2f}× faster" if factor > 1 else f"{1 / factor:.2f}× slower"
    ratios = [ratio.plain() if ratio is not None else "" for ratio in (was.ratio, now.ratio)]
    return [*now.key, was.time.milliseconds(), now.time.milliseconds(), *ratios, verdict]
