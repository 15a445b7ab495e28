"""What ``optimizer.explain()`` returns: what was compiled, for which device, and what happened since."""

from __future__ import annotations

from dataclasses import dataclass

from tabulate import tabulate


@dataclass(frozen=True)
class BatchReport:
    """One batch: parameters that are stepped together."""

    tensors: int
    elements: int
    dtype: str
    device: str
    backend: str
    units: str
    calls: int


@dataclass(frozen=True)
class Explanation:
    """A snapshot of how an optimizer runs. ``print`` it for a table.

    ``mode`` is "compiled" or "eager"; ``backends`` the names in use; ``graphs`` and ``kernels`` count the compiled
    units this optimizer calls and the loops or kernels in them; ``calls_per_step`` how often it calls one in a step;
    ``compile_seconds`` how long it waited for compilation; ``recompiles`` how many units it had to compile after its
    first step; ``events`` what the guard saw.
    """

    optimizer: str
    mode: str
    backends: tuple[str, ...]
    graphs: int
    kernels: int
    calls_per_step: int
    compile_seconds: float
    recompiles: int
    events: tuple[str, ...]
    batches: tuple[BatchReport, ...]

    def __str__(self) -> str:
        summary = [
            ("mode", self.mode),
            ("backends", ", ".join(self.backends)),
            ("graphs", self.graphs),
            ("kernels", self.kernels),
            ("calls per step", self.calls_per_step),
            ("compile seconds", f"{self.compile_seconds:.2f}"),
            ("recompiles", self.recompiles),
        ]
        parts = [self.optimizer, tabulate(summary, tablefmt="plain")]
        if self.batches:
            rows = [
                (b.tensors, f"{b.elements:,}", b.dtype, b.device, b.backend, b.units, b.calls) for b in self.batches
            ]
            headers = ("tensors", "elements", "dtype", "device", "backend", "units", "calls")
            parts.append(tabulate(rows, headers=headers, colalign=("right", "right")))
        else:
            parts.append("no step has been made yet")
        parts.append(
            "\n".join(["guard events:", *(f"  {event}" for event in self.events)]) if self.events else "no guard events"
        )
        return "\n\n".join(parts)
