"""The HTML page: it is well formed, loads nothing, and has what the report has."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from perf.__main__ import main
from perf.elements import element, html
from perf.page import page
from perf.report import FirstStep, HostCost, MemoryRow, NewProcess, Report, Row, Spread, ThreadRow

VOID = {"meta"}
LOADING = ("src", "srcset", "href", "xlink:href", "data", "action", "poster", "background", "style")


class Checked(HTMLParser):
    """Collects the elements of a page, and checks that tags are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.text = [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.text[self.open[-1]] = self.text.get(self.open[-1], "") + data

    def handle_decl(self, decl):
        assert decl == "doctype html"


def times(median):
    return Spread(median, 0.9 * median, 1.2 * median)


@pytest.fixture
def report():
    """A report with every section, with a text that would be markup, and with contenders that were not measured."""
    made = Report(
        {"cpu": "A <b>CPU</b> & more", "device": "cpu", "torch": "2.13"}, "python -m perf", "2026-01-02 03:04"
    )
    made.bytes_per_second, made.passes, made.notes = 1e10, 5, ["BUSY: <script>alert(1)</script>"]
    row = ("resnet50", "AdamW", "float32")
    sizes = (161, 25_557_032, 28, False)
    fused = {"baseline": "torch fused", "warmup_seconds": 1.0, "deviation": 1e-6, "rounds": 9}
    stored = {"to_plain": times(0.7), "stored_bytes": 16}
    made.rows = [
        Row(*row, "ours, 8-bit states", *sizes, time=times(0.06), ratio=times(0.6), **stored, **fused),
        Row(*row, "ours", *sizes, time=times(0.08), ratio=times(0.8), **fused),
        Row(*row, "torch fused", *sizes, time=times(0.1), ratio=times(1.0), **fused),
        Row(*row, "heavyball", *sizes, status="absent", reason="not installed: pip install .[peers]"),
        Row(*row[:2], "bfloat16", "ours", *sizes, status="error", reason="ValueError: a < b"),
    ]
    made.scaling = [
        ThreadRow("resnet50", "AdamW", name, count, 9, times(0.1 / count), times(1 / count), "torch fused", times(1.0))
        for name in ("ours", "torch fused")
        for count in (1, 2)
    ]
    made.first_steps = [FirstStep("ours", "tiny_mlp", "cold: empty cache directory", 8.0, 1, 1, 1, 0)]
    made.new_processes = [NewProcess("ours", "tiny_mlp", 3, times(1.0), times(0.2), [])]
    made.host_costs = [HostCost("construct", "ours", 30, times(0.01), "torch loop", times(1.1))]
    buffers = {"weights": 4.0, "gradients": 4.0, "exp_avg": 1.0, "exp_avg_sq": 1.0, "exp_avg_scale": 0.03}
    made.memory = [
        MemoryRow("resnet50", "ours, 8-bit states", "float32", 25_557_032, "ok", "", buffers, 0.5, 0.37),
        MemoryRow("resnet50", "torchao 8-bit", "float32", 25_557_032, "absent", "not installed"),
    ]
    return made


def test_the_page_is_well_formed_and_loads_nothing(report):
    text = page(report)
    found = Checked(text)
    for tag, attributes in found.seen:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "use", "image", "source")
        for name in LOADING:
            value = attributes.get(name, "")
            assert value.startswith("#") or value == "", (tag, name, value)
    assert "http:" not in text
    assert "https:" not in text
    assert not re.search(r"url\(|@import|import\s*\(|fetch\(|XMLHttpRequest", text)
    policy = next(attributes["content"] for _, attributes in found.seen if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none'")


def test_text_is_not_markup(report):
    text = page(report)
    assert text.count("<script>") == 1
    assert "A &lt;b&gt;CPU&lt;/b&gt; &amp; more" in text
    assert "BUSY: &lt;script&gt;" in text
    assert html(element("p", "a < b", element("b", "c"), " & d", title='"')) == (
        '<!doctype html>\n<p title="&quot;">a &lt; b<b>c</b> &amp; d</p>\n'
    )


def test_charts_are_drawings_with_what_was_measured(report):
    text = page(report)
    charts = [ElementTree.fromstring(drawn) for drawn in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    words = [[node.text for node in chart.iter("text")] for chart in charts]
    race, memory, scaling, compiling = words  # a race in which nothing was measured has none
    # the limit is that of 28 bytes, also if a contender with a storage of its own is first
    assert race == ["ours, 8-bit states", "60.0", "ours", "80.0", "torch fused", "100", "memory limit 71.6"]
    assert memory == ["ours, 8-bit states, float32 weights", "10.53"]
    assert {"ours", "torch fused", "1", "2"} < set(scaling)
    assert compiling[1::2] == ["8.00 s", "0.200 s"]
    bars = [float(node.get("width")) for node in charts[0].iter("rect")]
    assert bars[1] / bars[2] == pytest.approx(0.8, abs=0.01)
    parts = [float(node.get("width")) for node in charts[1].iter("rect")]
    assert len(parts) == 6  # weights, gradients, two moments, scales, the peak of a step
    assert parts[2] / parts[0] == pytest.approx(1 / 4, abs=0.01)
    for chart in charts:
        _, _, width, height = map(float, chart.get("viewBox").split())
        for node in chart.iter("rect"):
            assert 0 <= float(node.get("x")) <= width
            assert float(node.get("x")) + float(node.get("width")) <= width
        assert all(0 < float(node.get("y")) <= height for node in chart.iter("text"))


def test_tables_and_anchors(report):
    text = page(report)
    found = Checked(text)
    anchors = {attributes["id"] for tag, attributes in found.seen if tag == "section"}
    links = {attributes["href"] for tag, attributes in found.seen if tag == "a"}
    assert links == {f"#{anchor}" for anchor in anchors}
    assert anchors == {"summary", "storage", "memory", "scaling", "compile-cost", "race", "legend"}
    tags = [tag for tag, _ in found.seen]
    assert tags.count("th") == tags.count("button")  # every column can be sorted
    assert tags.count("table") == 8
    assert "prefers-color-scheme: dark" in text
    empty = page(Report({"cpu": "a"}, "command", "date"))
    assert "<table" not in empty
    assert "<svg" not in empty


def test_the_command_line_writes_it(report, tmp_path, capsys):
    report.save(tmp_path / "report.json")
    assert main(["--load", str(tmp_path / "report.json"), "--html", str(tmp_path / "report.html")]) == 0
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page(report)
    printed = capsys.readouterr().out
    assert "Storage: a step of AdamW" in printed
    assert "0.70 (0.63–0.84)" in printed
    assert "absent: torchao 8-bit (not installed)" in printed
