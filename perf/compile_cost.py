"""Measure the cost of compilation: the first step of AdamW in new processes with separate cache directories."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from perf.contenders import OURS
from perf.report import FirstStep

RECIPE = "torch.compile(step)"
COLD, SAME, WARM = (
    "cold: empty cache directory",
    "second model, same process",
    "warm: new process, same cache directory",
)

PROCESSES: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("first", OURS, [("gpt2_small", COLD), ("resnet50", SAME)]),
    ("first", OURS, [("gpt2_small", WARM)]),
    ("second", OURS, [("tiny_mlp", COLD)]),
    ("third", RECIPE, [("tiny_mlp", COLD)]),
]
"""Cache directory, contender, and workloads in order. Each entry is one process."""


class ChildError(Exception):
    """A child process failed. The message is one line for the report."""


def measure(device: str, progress: Callable[[str, float], None]) -> Iterator[FirstStep]:
    """Run the processes one after the other and yield their first steps."""
    with tempfile.TemporaryDirectory() as root:
        for done, (cache, contender, plan) in enumerate(PROCESSES):
            progress(f"first step of {contender} on {plan[0][0]}, {plan[0][1]}", done / len(PROCESSES))
            command = [sys.executable, "-m", "perf.first_step", contender, device, *(name for name, _ in plan)]
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(Path(root, cache))}
            result = subprocess.run(
                command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parent.parent
            )
            if result.returncode:
                said = result.stderr.strip().splitlines() or ["no message"]
                raise ChildError(f"first step of {contender} on {plan[0][0]} failed: {said[-1]}")
            lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
            for (workload, situation), counts in zip(plan, lines, strict=True):
                yield FirstStep(contender, workload, situation, **counts)
