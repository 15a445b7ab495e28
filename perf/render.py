"""Render a report as text for the terminal or as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from perf.contenders import CONTENDERS, OURS
from perf.report import Report, Row, brief
from perf.section import Section
from perf.storage_sections import memory_section, storage_section

USUAL = ("usual foreach", "adamp")
"""The contenders that share one column of the summary, because no optimizer has both."""


def text(report: Report) -> str:
    """Return the report as text for the terminal."""
    parts = []
    for section in sections(report):
        table = [tabulate(section.rows, headers=section.headers, disable_numparse=True)] if section.rows else []
        parts.append("\n".join([section.title, "", *table, *section.lines]))
    return "\n\n".join(parts)


def markdown(report: Report) -> str:
    """Return the report as Markdown."""
    parts = []
    for section in sections(report):
        table = tabulate(section.rows, headers=section.headers, tablefmt="github", disable_numparse=True)
        lines = "\n".join(f"- {line}" for line in section.lines)
        parts += [f"### {section.title}", *([table] if section.rows else []), *([lines] if lines else [])]
    return "\n\n".join(parts) + "\n"


def sections(report: Report) -> list[Section]:
    """Return all sections of the report, in order."""
    found = [_machine(report)]
    if report.rows:
        found += [*(_race(report, race) for race in report.races()), _summary(report)]
    if any(row.to_plain for row in report.rows):
        found.append(storage_section(report))
    if report.memory:
        found.append(memory_section(report))
    if report.scaling:
        found.append(_scaling(report))
    if report.first_steps:
        found.append(_first_steps(report))
    if report.new_processes:
        found.append(_new_processes(report))
    if report.host_costs:
        found.append(_host_costs(report))
    return [*found, Section("How to read this", lines=_legend(), topic="legend")]


def _machine(report: Report) -> Section:
    lines = [f"{what}: {value}" for what, value in report.machine.items()]
    if report.passes:
        rate = f"{report.bytes_per_second / 1e9:.1f} GB/s"
        lines.append(f"memory: {rate} read-modify-write, the best of {report.passes} passes during this run")
    lines += [f"command: {report.command}", f"took: {report.seconds:.0f} s"]
    lines += ["INTERRUPTED: what follows is what there was by then"] if report.interrupted else []
    return Section(f"Step times of optimizers, {report.date}", lines=lines + report.notes, topic="machine")


def _share(report: Report, row: Row) -> str:
    limit = report.limit(row)
    return f"{limit / row.time.median:.0%}" if limit is not None and row.time is not None else "cache"


def _race(report: Report, race: Sequence[Row]) -> Section:
    first = race[0]
    limit = report.usual_limit(race)
    title = (
        f"{first.workload}, {first.optimizer}, {first.dtype}: {first.tensors:,} tensors, "
        f"{first.parameters:,} parameters, {first.bytes_per_parameter} B to move for each"
        + (f", limit {brief(limit * 1e3)} ms" if limit else "")
        + (f"; {first.about}" if first.about else "")
    )
    measured = [row for row in race if row.time is not None]
    baseline = measured[0].baseline if measured else "baseline"
    headers = (
        "contender",
        "ms",
        f"/ {baseline}",
        "B/param",
        "of limit",
        "extra MB",
        "warm-up s",
        "deviation",
        "rounds",
    )
    rows = []
    for row in measured:
        assert row.time is not None
        worth = report.bytes_per_second * row.time.median / row.stepped
        rows.append([
            row.contender,
            row.time.milliseconds(),
            row.ratio.plain() if row.ratio is not None else "",
            f"{worth:.0f}" if limit is not None else "cache",
            _share(report, row),
            f"{(row.extra_bytes or 0) / 1e6:.1f}",
            f"{row.warmup_seconds:.1f}",
            f"{row.deviation:.0e}",
            str(row.rounds),
        ])  # fmt: skip
    lines = [f"ERROR {row.contender}: {row.reason}" for row in race if row.status == "error"]
    others: dict[str, list[str]] = {}
    for row in race:
        if row.time is None and row.status != "error":
            others.setdefault(f"{row.status}: {{}}" + (f" ({row.reason})" if row.reason else ""), []).append(
                row.contender
            )
    lines += [line.format(", ".join(names)) for line, names in others.items()]
    return Section(title, headers, rows, lines, topic="race")


def _summary(report: Report) -> Section:
    races = report.races()
    columns = [
        name
        for name, made in CONTENDERS.items()
        if name not in USUAL and not made.stored and any(r.contender == name and r.time for r in report.rows)
    ]
    usual = any(r.contender in USUAL and r.time for r in report.rows)
    rows = []
    for race in races:
        by_name = {row.contender: row for row in race}
        first, ours = race[0], by_name.get(OURS)
        cells = [_cell(by_name.get(name)) for name in columns]
        if usual:
            cells.append(
                " ".join(f"{_cell(by_name[name])} ({name})" for name in USUAL if name in by_name and by_name[name].time)
            )
        ratio = f"{ours.ratio.plain()} of {ours.baseline}" if ours is not None and ours.ratio is not None else ""
        share = _share(report, ours) if ours is not None and ours.time is not None else ""
        what = first.optimizer if first.dtype == "float32" else f"{first.optimizer} {first.dtype}"
        rows.append([first.workload, what, *cells, ratio, share])
    headers = [
        "workload",
        "optimizer",
        *columns,
        *(["usual"] if usual else []),
        "ours / baseline",
        "ours of limit",
    ]
    silent = [row for row in report.rows if row.contender not in (*columns, *(USUAL if usual else ()))]
    missing = {row.contender: row.reason for row in silent if row.status in ("absent", "skipped", "error")}
    grouped = {why: [name for name in missing if missing[name] == why] for why in missing.values()}
    return Section(
        "Summary: ms for a step, median",
        headers,
        rows,
        [f"not measured: {', '.join(names)}: {why}" for why, names in grouped.items()],
        topic="summary",
    )


def _cell(row: Row | None) -> str:
    if row is None or row.status == "none":
        return ""
    return brief(row.time.median * 1e3) if row.time is not None else row.status


def _first_steps(report: Report) -> Section:
    rows = [
        [
            first.contender,
            first.workload,
            first.situation,
            f"{first.seconds:.1f}",
            *("" if count is None else str(count) for count in (first.graphs, first.kernels, first.calls_per_step)),
            str(first.recompiles),
        ]
        for first in report.first_steps
    ]
    headers = ("contender", "workload", "situation", "first step s", "graphs", "kernels", "calls a step", "recompiles")
    return Section("What compiling costs: the first step of AdamW", headers, rows, topic="compile cost")


def _scaling(report: Report) -> Section:
    rows = [
        [
            row.workload,
            row.optimizer,
            row.contender,
            str(row.threads),
            row.time.milliseconds(),
            row.to_one_thread.plain() if row.to_one_thread is not None else "",
            row.ratio.plain() if row.ratio is not None else "",
            str(row.rounds),
        ]
        for row in report.scaling
    ]
    baseline = report.scaling[0].baseline
    headers = ("workload", "optimizer", "contender", "threads", "ms", "/ 1 thread", f"/ {baseline}", "rounds")
    return Section("Thread scaling: a step with each number of threads", headers, rows, topic="scaling")


def _new_processes(report: Report) -> Section:
    rows = [
        [
            new.contender,
            new.workload,
            new.import_torch.seconds(),
            new.until_stepped.seconds(),
            ", ".join(new.imported) or "none",
            str(new.processes),
        ]
        for new in report.new_processes
    ]
    headers = ("contender", "workload", "import torch s", "first step adds s", "compiler imported", "processes")
    title = "What the first step adds to import torch: a new process, compiled code on disk"
    return Section(title, headers, rows, topic="compile cost")


def _host_costs(report: Report) -> Section:
    rows = [
        [
            cost.what,
            cost.contender,
            cost.time.milliseconds(),
            f"{cost.ratio.plain()} of {cost.baseline}" if cost.ratio is not None else "",
            str(cost.rounds),
        ]
        for cost in report.host_costs
    ]
    headers = ("what", "contender", "ms", "ratio", "rounds")
    return Section("What a further optimizer costs: AdamW, code compiled before", headers, rows, topic="compile cost")


def _legend() -> list[str]:
    return [
        "ms: median (quartiles) over the rounds. In each round the contenders step in a new order, on copies of the "
        "same parameters. New gradients are copied into the same buffers right before each step.",
        "Ratio: time divided by that of the named contender in the same round; below 1 is faster. Slow contenders run "
        "in every fourth round.",
        "limit: the bytes that the rule has to move, divided by the memory bandwidth. B/param: the bytes per parameter "
        "that the memory can move in the measured time. of limit: limit divided by the measured time. The limit is the "
        "same for contenders that move more bytes, for example with clip_grad_norm_.",
        '"cache": much of the workload fits in the cache, so memory bandwidth is not the limit. For larger workloads '
        "the cache is evicted before each step.",
        "extra MB: peak memory that a step allocates. warm-up: construction and the first 2 steps; it may use compiled "
        "code from the cache directory, and is not part of ms. deviation: difference of these 2 steps, or of as many "
        "as the title says, from a float64 reference.",
        "recompiles: counted in 20 more steps with a schedule. graphs of torch.compile(step): total of the process.",
        "Thread scaling: the number of threads changes between steps, in a new order in each round; the first step "
        "after a change is not timed. / 1 thread: time divided by that with one thread in the same round.",
        "first step adds: from the end of import torch to the end of the first step, with the import of the optimizer. "
        "compiler imported: the parts of torch's compiler that were loaded by then.",
        "Storage: the bytes to move are those of the storage, so each has a limit of its own. / ours: time divided by "
        "that of ours without this storage, in the same round.",
        "Memory: each contender in a process of its own. a step adds: the peak of a step above what was there before, "
        "by the allocations of torch or by the resident memory of the process, whichever is larger.",
        "All results are for the device named at the top only.",
    ]
