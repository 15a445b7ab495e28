"""Measure the cost of compilation: the first step of AdamW in new processes with separate cache directories."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perf.children import Progress, child
from perf.contenders import OURS
from perf.race import spread
from perf.report import FirstStep, NewProcess

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

AFTER_IMPORT = {OURS: ("compiled_optim", {}), "torch fused": ("torch.optim", {"fused": True})}
"""The module and the options of the contenders that are compared with ``import torch``."""

AFTER_IMPORT_CACHE, AFTER_IMPORT_WORKLOAD, AFTER_IMPORT_ROUNDS = "second", "tiny_mlp", 3


def first_steps(device: str, root: Path, progress: Progress) -> Iterator[FirstStep]:
    """Run the processes one after the other, with cache directories in ``root``, and yield their first steps."""
    for done, (cache, contender, plan) in enumerate(PROCESSES):
        what = f"first step of {contender} on {plan[0][0]}"
        progress(f"{what}, {plan[0][1]}", done / len(PROCESSES))
        words = ["perf.first_step", contender, device, *(name for name, _ in plan)]
        for (workload, situation), counts in zip(plan, child(what, words, _cached_in(root / cache)), strict=True):
            yield FirstStep(contender, workload, situation, **counts)


def new_processes(device: str, root: Path, progress: Progress) -> Iterator[NewProcess]:
    """Measure what the first step adds to ``import torch`` in new processes, with compiled code on disk.

    The contenders take turns. The first process of each is not counted: it fills the cache directory if ``first_steps``
    did not, and reads files that later processes find in memory.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in AFTER_IMPORT}
    for done in range(1 + AFTER_IMPORT_ROUNDS):
        for contender, (module, options) in AFTER_IMPORT.items():
            what = f"first step of {contender} after import torch"
            progress(what, done / (1 + AFTER_IMPORT_ROUNDS))
            words = ["perf.new_process", module, json.dumps(options), AFTER_IMPORT_WORKLOAD, device]
            found[contender] += child(what, words, _cached_in(root / AFTER_IMPORT_CACHE))
    for contender, (_, *counted) in found.items():
        importing = spread([process["import_torch"] for process in counted])
        stepping = spread([process["until_stepped"] for process in counted])
        imported = counted[-1]["imported"]
        yield NewProcess(contender, AFTER_IMPORT_WORKLOAD, len(counted), importing, stepping, imported)


def _cached_in(path: Path) -> dict[str, str]:
    return {"TORCHINDUCTOR_CACHE_DIR": str(path)}
