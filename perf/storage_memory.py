"""Measure the memory of AdamW in each storage, each in a process of its own, so that nothing is left of another one."""

from __future__ import annotations

from collections.abc import Iterator

from perf.children import ChildError, Progress, child
from perf.contenders import CONTENDERS, OURS
from perf.report import MemoryRow
from perf.workloads import WORKLOADS, elements

MEASURED = [
    *(("torch fused", "float32"), (OURS, "float32")),
    *((name, made.stored.dtype) for name, made in CONTENDERS.items() if made.stored and made.stored.dtype == "float32"),
    *(("torch fused", "bfloat16"), (OURS, "bfloat16")),
    *((name, made.stored.dtype) for name, made in CONTENDERS.items() if made.stored and made.stored.dtype != "float32"),
]
"""The contenders, and the dtype of the parameters of each."""

DEFAULT = "resnet50"

RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Environment of the child: malloc returns freed memory, so that a step cannot reuse what the step before left."""


def memory_rows(device: str, workload: str, progress: Progress) -> Iterator[MemoryRow]:
    """Yield a row for each contender. One that is not installed, or that fails, has the reason in its row."""
    count = elements(WORKLOADS[workload].shapes)
    for done, (contender, dtype) in enumerate(MEASURED):
        what = f"memory of {contender}, {dtype}"
        progress(what, done / len(MEASURED))
        row = MemoryRow(workload, contender, dtype, count)
        if (reason := CONTENDERS[contender].absent()) is not None:
            row.status, row.reason = "absent", reason
        else:
            try:
                (found,) = child(what, ["perf.step_memory", contender, dtype, workload, device], RETURN_MEMORY)
                row.buffers, row.step, row.largest = found["buffers"], found["step"], found["largest"]
            except ChildError as error:
                row.status, row.reason = "error", str(error)
        yield row
