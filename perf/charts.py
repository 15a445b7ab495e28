"""The charts of the HTML page, as SVG. Colours are classes of the style sheet, so that they follow light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from perf.contenders import OURS
from perf.elements import element
from perf.report import MemoryRow, Report, Row, Spread, ThreadRow, brief
from perf.workloads import WORKLOADS

WIDTH = 360
ROW, BAR = 22, 13
CHARACTER = 6.6
"""About the width of a character."""


@dataclass(frozen=True)
class Bar:
    """A bar with a label, the text behind it, and the classes and lengths of its parts."""

    label: str
    value: str
    parts: Sequence[tuple[str, float, str]]
    spread: Spread | None = None

    @property
    def length(self) -> float:
        """The length of all parts, or the upper quartile if that is more."""
        return max(sum(size for _, size, _ in self.parts), self.spread.high if self.spread else 0.0)


def race_chart(report: Report, race: Sequence[Row]) -> Element | None:
    """Return the step times of a race as bars, with a line at the memory limit. None if nothing was measured."""
    bars = [
        Bar(row.contender, brief(row.time.median * 1e3), [(_kind(row), row.time.median, "")], row.time)
        for row in race
        if row.time is not None
    ]
    first = race[0]
    dtype = "" if first.dtype == "float32" else f", {first.dtype}"
    title = WORKLOADS[first.workload].title if first.workload in WORKLOADS else first.workload
    return _figure(f"{title}: {first.optimizer}{dtype}, ms", _bars(bars, report.usual_limit(race))) if bars else None


def _kind(row: Row) -> str:
    if row.contender.startswith(OURS):
        return "ours" if row.contender == OURS else "variant"
    return "baseline" if row.contender == row.baseline else "peer"


def scaling_charts(rows: Sequence[ThreadRow]) -> list[Element]:
    """Return a chart for each workload: the step time of each contender over the number of threads."""
    charts = []
    for workload in dict.fromkeys(row.workload for row in rows):
        lines = {
            name: [row for row in rows if row.workload == workload and row.contender == name]
            for name in dict.fromkeys(row.contender for row in rows)
        }
        title = f"{workload}: {rows[0].optimizer}, ms with a number of threads"
        charts.append(_figure(title, _lines({name: line for name, line in lines.items() if line})))
    return charts


def _lines(lines: dict[str, list[ThreadRow]]) -> Element:
    left, right, top, bottom = 44, WIDTH - 96, 12, 170
    counts = sorted({row.threads for line in lines.values() for row in line})
    most = max(row.time.median for line in lines.values() for row in line) * 1.05

    def x(threads: int) -> float:
        return left + (right - left) * counts.index(threads) / max(len(counts) - 1, 1)

    def y(seconds: float) -> float:
        return bottom - (bottom - top) * seconds / most

    drawn = [element("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis")]
    for part in (0.0, 0.5, 1.0):
        drawn.append(element("line", x1=left, x2=right, y1=y(part * most), y2=y(part * most), class_="grid"))
        drawn.append(
            element(
                "text", brief(part * most * 1e3), x=left - 6, y=y(part * most) + 4, class_="tick", text_anchor="end"
            )
        )
    for count in counts:
        drawn.append(element("text", str(count), x=x(count), y=bottom + 16, class_="tick", text_anchor="middle"))
    for name, line in lines.items():
        kind = "ours" if name == OURS else "baseline"
        path = " ".join(f"{x(row.threads):.1f},{y(row.time.median):.1f}" for row in line)
        drawn.append(element("polyline", points=path, class_=f"line {kind}"))
        for row in line:
            drawn.append(
                element(
                    "circle",
                    element("title", f"{name}, {row.threads} threads: {row.time.milliseconds()} ms"),
                    cx=x(row.threads), cy=y(row.time.median), r=3.5, class_=kind,
                )
            )  # fmt: skip
    lowest = bottom + 4.0
    for name in sorted(lines, key=lambda name: lines[name][-1].time.median):
        lowest = min(y(lines[name][-1].time.median) + 4, lowest)
        kind = "ours" if name == OURS else "baseline"
        drawn.append(element("text", name, x=right + 8, y=lowest, class_=f"name {kind}"))
        lowest -= 14  # the next label is above this one, also where the lines end close to each other
    return _svg(bottom + 24, drawn, "a line for each contender")


def compile_chart(report: Report) -> Element | None:
    """Return the seconds of first steps as bars, or None if they were not measured."""
    bars = [
        Bar(f"{first.contender}, {first.workload}, {first.situation}", _seconds(first.seconds),
            [("ours" if first.contender == OURS else "peer", first.seconds, "")])
        for first in report.first_steps
    ]  # fmt: skip
    bars += [
        Bar(f"{new.contender}, {new.workload}, warm, without import torch",
            _seconds(new.until_stepped.median),
            [("ours" if new.contender == OURS else "baseline", new.until_stepped.median, "")])
        for new in report.new_processes
    ]  # fmt: skip
    return _figure("The first step of AdamW, seconds", _bars(bars, None, above=True)) if bars else None


def _seconds(value: float) -> str:
    return f"{brief(value)} s"


KINDS = {
    "weights": "weights",
    "gradients": "gradients",
    "exp_avg": "first moment",
    "state1": "first moment",
    "exp_avg_sq": "second moment",
    "state2": "second moment",
    "master": "master weights",
    "compensation": "compensation",
}
"""What buffers are, by name. Others belong to the scales of quantised states."""

VISIBLE = 0.005
"""The fewest bytes that are drawn."""

SEGMENTS = (*dict.fromkeys(KINDS.values()), "scales", "peak of a step")


def memory_chart(rows: Sequence[MemoryRow]) -> Element | None:
    """Return the bytes for each parameter as bars with a part for each buffer, or None if nothing was measured."""
    bars, used = [], set()
    for row in rows:
        if row.status != "ok":
            continue
        sizes = dict.fromkeys(SEGMENTS, 0.0)
        for name, size in row.buffers.items():
            sizes[KINDS.get(name, "scales")] += size
        sizes["peak of a step"] = row.step
        used |= {kind for kind, size in sizes.items() if size >= VISIBLE}
        parts = [
            (f"segment-{place}", sizes[kind], f"{kind}: {sizes[kind]:.2f} bytes for each parameter")
            for place, kind in enumerate(SEGMENTS)
            if sizes[kind] >= VISIBLE
        ]
        bars.append(Bar(f"{row.contender}, {row.dtype} weights", f"{row.total:.2f}", parts))
    if not bars:
        return None
    workloads = ", ".join(dict.fromkeys(row.workload for row in rows))
    legend = [
        element("span", element("i", "", class_=f"segment-{place}"), kind)
        for place, kind in enumerate(SEGMENTS)
        if kind in used
    ]
    figure = _figure(f"AdamW on {workloads}, bytes for each parameter", _bars(bars, None, above=True))
    figure.append(element("p", *legend, class_="legend"))
    return figure


def _bars(bars: Sequence[Bar], limit: float | None, above: bool = False) -> Element:
    """Return horizontal bars. ``limit`` is the place of a vertical line; ``above`` puts labels above the bars."""
    left = 0.0 if above else min(max(len(bar.label) for bar in bars) * CHARACTER + 6, 0.45 * WIDTH)
    room = WIDTH - left - max(len(bar.value) for bar in bars) * CHARACTER - 10
    scale = room / max(max(bar.length for bar in bars), limit or 0.0)
    height = ROW + 14 if above else ROW
    top = 16 if limit is not None else 2
    drawn = []
    for place, bar in enumerate(bars):
        y = top + place * height
        middle = y + height - ROW + ROW / 2
        label_y = y + 13 if above else middle + 4
        style, anchor = ("above", {}) if above else ("label", {"text_anchor": "end"})
        drawn.append(element("text", bar.label, x=left - (0 if above else 6), y=label_y, class_=style, **anchor))
        x = left
        for kind, size, about in bar.parts:
            told = [element("title", about)] if about else []
            width = max(size * scale, 0.5)
            drawn.append(element("rect", *told, x=x, y=middle - BAR / 2, width=width, height=BAR, class_=kind))
            x += size * scale
        if bar.spread is not None:
            ends = left + bar.spread.low * scale, left + bar.spread.high * scale
            drawn.append(element("line", x1=ends[0], x2=ends[1], y1=middle, y2=middle, class_="spread"))
        drawn.append(element("text", bar.value, x=left + bar.length * scale + 5, y=middle + 4, class_="value"))
    bottom = top + len(bars) * height
    if limit is not None:
        x = left + limit * scale
        drawn.append(element("line", x1=x, x2=x, y1=12, y2=bottom, class_="limit"))
        caption = f"memory limit {brief(limit * 1e3)}"
        anchor_right = x + len(caption) * CHARACTER / 2 > WIDTH
        drawn.append(
            element("text", caption, x=WIDTH if anchor_right else x, y=9, class_="tick",
                    text_anchor="end" if anchor_right else "middle")
        )  # fmt: skip
    described = ", ".join(f"{bar.label} {bar.value}" for bar in bars)
    return _svg(bottom + 4, drawn, described)


def _svg(height: float, drawn: Iterable[Element], described: str) -> Element:
    return element("svg", *drawn, viewBox=f"0 0 {WIDTH} {height:.0f}", role="img", aria_label=described)


def _figure(title: str, drawing: Element) -> Element:
    return element("figure", element("figcaption", title), drawing)
