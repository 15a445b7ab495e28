"""What ``optimizer.explain()`` returns: what was compiled, for which device, and what happened since."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tabulate import tabulate

if TYPE_CHECKING:
    from compiled_optim.backends import Backend
    from compiled_optim.plan import Batch, Plan


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

    @classmethod
    def of(cls, batch: Batch, calls: int) -> BatchReport:
        """Report on a batch that makes so many calls a step."""
        return cls(
            tensors=len(batch.params),
            elements=sum(math.prod(shape) for shape in batch.spec.shapes()),
            dtype=str(batch.params[0].dtype).removeprefix("torch."),
            device=str(batch.params[0].device),
            backend=batch.spec.backend.name,
            units=", ".join(dict.fromkeys(str(call.signature) for call in batch.calls)),
            calls=calls,
        )


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

    @classmethod
    def of(
        cls,
        optimizer: str,
        backends: Sequence[Backend],
        plan: Plan | None,
        compile_seconds: float,
        recompiles: int,
        events: Sequence[str],
    ) -> Explanation:
        """Explain a plan, or that there is none yet."""
        batches = plan.batches if plan is not None else []
        measuring = plan.scaling.calls if plan is not None else []
        calls = [[*batch.every_call(), *norms] for batch, norms in zip(batches, measuring, strict=True)]
        units = {id(call.unit): call.unit for batch_calls in calls for call in batch_calls}
        return cls(
            optimizer=optimizer,
            mode="compiled" if any(backend.compiles for backend in backends) else "eager",
            backends=tuple(backend.name for backend in backends),
            graphs=sum(unit.graphs for unit in units.values()),
            kernels=sum(unit.kernels for unit in units.values()),
            calls_per_step=sum(map(len, calls)),
            compile_seconds=compile_seconds,
            recompiles=recompiles,
            events=tuple(events),
            batches=tuple(
                BatchReport.of(batch, len(batch_calls)) for batch, batch_calls in zip(batches, calls, strict=True)
            ),
        )

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
