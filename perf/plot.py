"""Plot a report: a group of bars for each race, with the speed relative to the baseline and the memory limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from perf.contenders import OURS
from perf.report import BadInput, Report, Row
from perf.workloads import WORKLOADS

COLORS = {
    OURS: "#c8102e",
    "ours eager": "#f0a8a8",
    "torch fused": "#1f3a5f",
    "torch foreach": "#5b84b1",
    "torch loop": "#b5cbe3",
    "torch.compile(step)": "#e8a33d",
    "usual foreach": "#8a8a8a",
    "adamp": "#6f9e6f",
    "heavyball": "#7d5ba6",
    "optimi": "#4fa3a5",
    "deepspeed": "#a0522d",
}
"""The contenders that are plotted. Those that differ in their storage only are in the tables and in the HTML page."""

INK, FAINT = "#222222", "#777777"
PER_PANEL = 9
FAR = 1.6


def draw(report: Report, path: Path) -> None:
    """Plot every race that was measured and write the image."""
    races = [[row for row in race if row.ratio is not None and row.contender in COLORS] for race in report.races()]
    races = [race for race in races if race]
    if not races:
        raise BadInput("nothing was measured that could be drawn")
    fused = [race for race in races if race[0].baseline == "torch fused"]
    others = [race for race in races if race[0].baseline != "torch fused"]
    panels = [part for kind in (fused, others) for part in _cut(kind)]
    figure = Figure(figsize=(13.33, 1.3 + 3.1 * len(panels)), dpi=150)
    figure.set_layout_engine("constrained", h_pad=0.12, w_pad=0.1)
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        _panel(axes, panel, report)
    used = [name for name in COLORS if any(row.contender == name for race in races for row in race)]
    handles: list[Patch | Line2D] = [Patch(color=COLORS[name], label=name) for name in used]
    if any(report.usual_limit(race) for race in races):
        handles.append(Line2D([], [], color=INK, linewidth=2.2, label="memory limit"))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), 9), frameon=False, columnspacing=1.4
    )
    machine = report.machine
    figure.suptitle(
        f"Speed of an optimizer step on {machine['device']}: {machine['cpu']}, {machine['threads']} threads, "
        f"torch {machine['torch'].split('+')[0]}, {report.date[:10]}",
        fontsize=14,
        color=INK,
    )
    figure.savefig(path)


def _cut(races: Sequence[list[Row]]) -> list[Sequence[list[Row]]]:
    """Split the races into panels of about equal length, with at most PER_PANEL races each."""
    count = -(-len(races) // PER_PANEL)
    return [races[len(races) * i // count : len(races) * (i + 1) // count] for i in range(count)]


def _panel(axes: Axes, races: Sequence[list[Row]], report: Report) -> None:
    width = min(0.84 / max(map(len, races)), 0.2)
    ratios = [row.ratio for race in races for row in race if row.ratio is not None]
    highest = max(1 / ratio.low for ratio in ratios)
    limits = [_limit(race, report) for race in races]
    # a limit far above all bars would make them small, so it is printed as text at the top
    top = min(max([highest, *(limit for limit in limits if limit)]), FAR * highest)
    for place, (race, limit) in enumerate(zip(races, limits, strict=True)):
        start = place - width * (len(race) - 1) / 2
        for number, row in enumerate(race):
            _bar(axes, start + number * width, width * 0.92, row, top)
        if limit is not None and limit <= top:
            reach = width * len(race) / 2 + 0.04
            axes.hlines(limit, place - reach, place + reach, color=INK, linewidth=2.2, zorder=4)
        elif limit is not None:
            axes.text(place, top * 1.02, f"limit {limit:.1f}× ↑", ha="center", fontsize=9.5, color=INK)
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    same = len({race[0].baseline for race in races}) == 1
    axes.set_xticks(range(len(races)), [_label(race[0], same) for race in races], fontsize=10, color=INK)
    axes.set_ylabel(
        f"speed, {races[0][0].baseline if same else 'usual implementation'} = 1\nhigher is better", color=INK
    )
    axes.set_xlim(-0.55, max(len(races), 4) - 0.45)
    axes.set_ylim(0, top * 1.13)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _bar(axes: Axes, x: float, width: float, row: Row, top: float) -> None:
    """Draw the bar of one contender with its quartiles; for ours, also the number."""
    assert row.ratio is not None
    speed, slow, fast = 1 / row.ratio.median, 1 / row.ratio.high, 1 / row.ratio.low
    axes.bar(x, speed, width, color=COLORS[row.contender], zorder=2)
    if row.contender != row.baseline:
        axes.errorbar(
            x, speed, yerr=[[speed - slow], [fast - speed]], color=FAINT, linewidth=0.9, capsize=1.5, zorder=3
        )
    if row.contender == OURS:
        inside = slow > 0.25 * top
        axes.annotate(
            f"{speed:.2f}×" if speed < 9.95 else f"{speed:.0f}×",
            (x, slow if inside else fast), xytext=(0, -4 if inside else 4), textcoords="offset points", rotation=90,
            ha="center", va="top" if inside else "bottom", fontsize=10.5, fontweight="bold",
            color="white" if inside else COLORS[OURS], zorder=5,
        )  # fmt: skip


def _limit(race: Sequence[Row], report: Report) -> float | None:
    """Return the speed of a step at the memory limit, relative to the baseline."""
    limit = report.usual_limit(race)
    baseline = next((row.time for row in race if row.contender == row.baseline), None)
    return baseline.median / limit if limit is not None and baseline is not None else None


def _label(row: Row, same_baseline: bool) -> str:
    dtype = "" if row.dtype == "float32" else f", {row.dtype}"
    lines = [WORKLOADS[row.workload].title, f"{row.optimizer}{dtype}"]
    if not same_baseline:
        lines.append(f"against {row.baseline}")
    return "\n".join(lines)
