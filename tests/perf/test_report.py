"""The report: its rows, its JSON, the comparison of two reports, and the limit by memory bandwidth."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from perf import render
from perf.__main__ import main
from perf.compare import compare
from perf.report import Report, Spread

from .racing import EAGER, QUICK


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A report of the tiny workload, without anything that has to be compiled as a whole model or installed."""
    path = tmp_path_factory.mktemp("perf") / "report.json"
    contenders = [word for name in ("ours", "torch fused", *EAGER) for word in ("--contender", name)]
    assert main([*QUICK, *contenders, "--json", str(path)]) == 0
    return path


def test_rows_have_times_ratios_and_what_the_step_took(saved):
    report = Report.load(saved)
    rows = {row.contender: row for row in report.rows}
    assert rows["ours"].status == "ok"
    for row in rows.values():
        if row.status == "ok":
            assert 1 <= row.rounds <= 3
            assert 0 < row.time.low <= row.time.median <= row.time.high
            assert row.baseline == "torch fused"
            assert row.warmup_seconds > 0
            assert row.deviation < 1e-5
    assert rows["ours"].rounds == rows["torch fused"].rounds == 3
    assert rows["torch fused"].ratio == Spread(1.0, 1.0, 1.0)
    assert rows["ours"].extra_bytes < 1000 < rows["torch foreach"].extra_bytes
    assert report.bytes_per_second > 0
    assert report.machine["threads"] == str(torch.get_num_threads())


def test_json_comes_back_and_can_be_shown_again(saved, tmp_path, capsys):
    report = Report.load(saved)
    report.save(tmp_path / "again.json")
    assert Report.load(tmp_path / "again.json") == report
    assert main(["--load", str(saved), "--markdown", str(tmp_path / "a.md"), "--plot", str(tmp_path / "a.png")]) == 0
    assert "tiny_mlp, AdamW, float32: 20 tensors, 41,600 parameters, 28 B to move for each" in capsys.readouterr().out
    assert "| tiny_mlp " in (tmp_path / "a.md").read_text()
    picture = (tmp_path / "a.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000


def test_a_report_without_the_newer_sections_loads(saved, tmp_path):
    content = json.loads(saved.read_text())
    for name in ("scaling", "new_processes", "host_costs"):
        del content[name]
    content["rows"] = [{key: value for key, value in row.items() if key != "about"} for row in content["rows"]]
    (tmp_path / "older.json").write_text(json.dumps(content))
    assert Report.load(tmp_path / "older.json") == Report.load(saved)


def test_compare_tells_what_changed_beyond_the_spread(saved, tmp_path, capsys):
    old = Report.load(saved)
    assert "0 of 5 rows measured in both changed" in compare(old, Report.load(saved))
    new = Report.load(saved)
    new.machine["threads"] = "64"
    for report, ratio in ((old, Spread(1.0, 0.9, 1.1)), (new, Spread(0.5, 0.4, 0.6))):
        report.rows = [replace(r, ratio=ratio) if r.contender == "ours" else r for r in report.rows]
    assert "0 of 5 rows" in compare(old, new)
    assert "5 rows have fewer than 8 rounds, too few to tell" in compare(old, new)
    for report in (old, new):
        report.rows = [replace(row, rounds=20) for row in report.rows]
    said = compare(old, new)
    assert "The baselines took 1.00 to 1.00 times as long as then" in said
    assert "1 of 5 rows measured in both changed" in said
    assert "2.00× faster" in said
    assert f"threads differs: {old.machine['threads']} then, 64 now" in said
    new.rows = [replace(r, ratio=Spread(0.95, 0.85, 1.05)) if r.contender == "ours" else r for r in new.rows]
    assert "0 of 5 rows" in compare(old, new)
    new.rows = [replace(r, status="error", time=None) if r.contender == "ours" else r for r in new.rows[:-1]]
    assert "tiny_mlp AdamW float32 ours: ok then, error now" in compare(old, new)
    assert "only in the report of then: 1 rows" in compare(old, new)
    new.save(tmp_path / "new.json")
    assert main(["--load", str(tmp_path / "new.json"), "--compare", str(saved)]) == 0
    assert "Compared with the report of" in capsys.readouterr().out


def test_the_limit_is_bytes_over_bandwidth_and_not_for_what_fits_in_the_cache(saved):
    report = Report.load(saved)
    report.bytes_per_second = 28e9
    row = replace(report.rows[0], parameters=10**9, in_cache=False, time=Spread(2.0, 2.0, 2.0))
    assert report.limit(report.rows[0]) is None
    assert report.limit(row) == pytest.approx(1.0)
    report.rows = [row]
    said = render.text(report)
    assert "limit 1000 ms" in said
    assert " 56 " in said  # bytes for each parameter could have been moved in 2 s
    assert " 50%" in said
