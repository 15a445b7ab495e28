"""Run modules of this package in new processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Progress = Callable[[str, float], None]


class ChildError(Exception):
    """A child process failed. The message is one line for the report."""


def child(what: str, words: list[str], environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Run a module in a new process with these variables, and return the lines of JSON that it prints."""
    result = subprocess.run(
        [sys.executable, "-m", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    if result.returncode:
        said = result.stderr.strip().splitlines() or ["no message"]
        raise ChildError(f"{what} failed: {said[-1]}")
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
