"""Write a report to the terminal and to files."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from perf.compare import compare
from perf.page import page
from perf.render import markdown, text
from perf.report import BadInput, Report

PICTURES = (".png", ".svg", ".pdf")


def check_writable(*paths: Path | None) -> None:
    """Raise BadInput if a file cannot be written. Called before the measurement."""
    *_, plot = paths
    for path in paths:
        if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
            raise BadInput(f"cannot write {path}")
    if plot is not None and plot.suffix not in PICTURES:
        raise BadInput(f"--plot {plot}: the name must end in one of {', '.join(PICTURES)}")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise BadInput("--plot needs matplotlib: pip install .[perf]")


def write(
    report: Report, old: Report | None, json: Path | None, marked: Path | None, html: Path | None, plot: Path | None
) -> None:
    """Print the report and write the given files."""
    print(text(report))
    if old is not None:
        print(f"\n{compare(old, report)}")
    if json is not None:
        report.save(json)
    if marked is not None:
        marked.write_text(markdown(report))
    if html is not None:
        html.write_text(page(report), encoding="utf-8")
        print(f"\nThe same with plots, for a browser: {html}")
    if plot is not None:
        from perf.plot import draw

        draw(report, plot)
