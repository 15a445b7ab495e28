"""Render a report as one HTML page that loads nothing: style, script and charts are in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

from perf.charts import compile_chart, memory_chart, race_chart, scaling_charts
from perf.elements import element, html
from perf.render import sections
from perf.report import Report
from perf.section import Section

FOLDER = Path(__file__).parent
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""The browser loads nothing from elsewhere, even if a text in the report should ask for it."""

TOPICS = {
    "summary": "Step times against peers and the memory limit",
    "storage": "Step times of storages",
    "memory": "Memory of storages",
    "scaling": "Thread scaling",
    "compile cost": "Compile cost",
    "race": "Each race in full",
    "legend": "How to read this",
}
"""The parts of the page, in order, and their headings."""


def page(report: Report) -> str:
    """Return the report as HTML."""
    found = sections(report)
    parts = {topic: _part(topic, [s for s in found if s.topic == topic], _charts(topic, report)) for topic in TOPICS}
    shown = {topic: part for topic, part in parts.items() if part is not None}
    links = [element("a", TOPICS[topic], href=f"#{_anchor(topic)}") for topic in shown]
    (machine,) = (section for section in found if section.topic == "machine")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", machine.title),
        element("style", (FOLDER / "page.css").read_text()),
    )
    body = element(
        "body",
        element("header", element("h1", machine.title), _facts(machine.lines), element("nav", *links)),
        element("main", *shown.values()),
        element("script", (FOLDER / "page.js").read_text()),
    )
    return html(element("html", head, body, lang="en"))


def _anchor(topic: str) -> str:
    return topic.replace(" ", "-")


def _facts(lines: Sequence[str]) -> Element:
    """Return lines as a list of names and values. A line without a name, or in capitals, is a warning."""
    facts = element("dl")
    for line in lines:
        name, colon, value = line.partition(": ")
        if colon and not name.isupper():
            facts.append(element("dt", name))
            facts.append(element("dd", value))
        else:
            facts.append(element("dd", line, class_="warning"))
    return facts


def _charts(topic: str, report: Report) -> list[Element]:
    """Return the charts of a part of the page."""
    match topic:
        case "summary":
            found = [race_chart(report, race) for race in report.races()]
        case "memory":
            found = [memory_chart(report.memory)]
        case "scaling":
            found = [*scaling_charts(report.scaling)] if report.scaling else []
        case "compile cost":
            found = [compile_chart(report)]
        case _:
            found = []
    return [chart for chart in found if chart is not None]


def _part(topic: str, found: Sequence[Section], charts: Sequence[Element]) -> Element | None:
    """Return a part of the page, or None if the report has nothing for it."""
    if not found:
        return None
    made = element("section", element("h2", TOPICS[topic]), id=_anchor(topic))
    if charts:
        made.append(element("div", *charts, class_="charts"))
    for section in found:
        if topic == "race":
            made.append(element("details", element("summary", section.title), *_content(section)))
        else:
            title = [element("h3", section.title)] if section.title != TOPICS[topic] else []
            for part in (*title, *_content(section)):
                made.append(part)
    return made


def _content(section: Section) -> list[Element]:
    parts = []
    if section.rows:
        header = [element("th", element("button", name, type="button"), scope="col") for name in section.headers]
        body = [element("tr", *(element("td", cell) for cell in row)) for row in section.rows]
        table = element("table", element("thead", element("tr", *header)), element("tbody", *body))
        parts.append(element("div", table, class_="table"))
    if section.lines:
        parts.append(element("ul", *(element("li", line) for line in section.lines)))
    return parts
