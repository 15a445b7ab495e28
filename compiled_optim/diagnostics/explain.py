"""The report that ``explain()`` returns: the calls of a step, the compiled units, guard events and advice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from compiled_optim.backends import BoundCall
from compiled_optim.diagnostics.text import counted
from compiled_optim.diagnostics.units import COMPILED, FROM_DISK, FROM_PROCESS, UnitReport
from compiled_optim.engine.buckets import Bucket
from compiled_optim.engine.plan import Plan
from compiled_optim.engine.storage_options import bytes_by_list


@dataclass(frozen=True)
class BatchReport:
    """Parameters that are stepped together, their units, and the number of calls in a step."""

    tensors: int
    elements: int
    dtype: str
    device: str
    backend: str
    units: tuple[str, ...]
    calls: int
    bytes: Mapping[str, int]
    """The bytes of gradients, parameters and each state, by name."""

    @classmethod
    def from_bucket(cls, bucket: Bucket, calls: Sequence[BoundCall]) -> BatchReport:
        """Return the report on a bucket for which a step makes these calls."""
        shapes = [(size,) for size in bucket.flat_layout.sizes] if bucket.is_flat else bucket.shapes
        used: Counter[str] = Counter()
        for shape in shapes:
            used.update(bytes_by_list(bucket.program, bucket.dtypes, shape))
        return cls(
            tensors=len(bucket.entries),
            elements=sum(map(math.prod, shapes)),
            dtype=str(bucket.entries[0].param.dtype).removeprefix("torch."),
            device=str(bucket.device),
            backend=bucket.backend.name,
            units=tuple(dict.fromkeys(str(call.signature) for call in calls)),
            calls=len(calls),
            bytes=dict(used),
        )


@dataclass(frozen=True)
class Explanation:
    """A snapshot of how an optimizer runs. ``print`` it for tables.

    ``mode`` is "compiled" or "eager"; ``backends`` the names in use; ``graphs`` and ``kernels`` count the compiled
    units this optimizer calls and the loops or kernels in them; ``calls_per_step`` counts the calls of one step;
    ``compile_seconds`` is the time it waited for compilation; ``recompiles`` counts the units compiled after its first
    step; ``events`` are those of the guard. ``batches`` and ``units`` are the rows of the tables. ``advice`` lists what
    is unusual, with remedies.
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
    units: tuple[UnitReport, ...]
    advice: tuple[str, ...]
    routes: tuple[str, ...] = ()
    """Which parameters follow which rule, if the optimizer has several."""

    @classmethod
    def from_plan(
        cls,
        optimizer: str,
        mode: str,
        backends: Sequence[str],
        plan: Plan | None,
        units: Sequence[UnitReport],
        events: Sequence[str],
        advice: Iterable[str],
        routes: Iterable[str] = (),
    ) -> Explanation:
        """Return the report on a plan; None if no step was made yet."""
        calls = {} if plan is None else plan.calls()
        called = {id(call.unit): call.unit for bucket_calls in calls.values() for call in bucket_calls}
        buckets = [] if plan is None else [bound.bucket for bound in plan.buckets]
        return cls(
            optimizer=optimizer,
            mode=mode,
            backends=tuple(backends),
            graphs=sum(unit.graphs for unit in called.values()),
            kernels=sum(unit.kernels for unit in called.values()),
            calls_per_step=sum(map(len, calls.values())),
            compile_seconds=sum(unit.seconds for unit in units),
            recompiles=sum(bool(unit.reason) for unit in units),
            events=tuple(events),
            batches=tuple(BatchReport.from_bucket(bucket, calls[i]) for i, bucket in enumerate(buckets)),
            units=tuple(units),
            advice=tuple(advice),
            routes=tuple(routes),
        )

    def __str__(self) -> str:
        parts = [self._summary(), *([_listed("routes", self.routes)] if self.routes else []), self._batches()]
        if self.batches:
            parts.append(self._memory())
        if self.units:
            parts.append(self._units())
        parts.append(_listed("recompiles", [f"{unit.name}: {unit.reason}" for unit in self.units if unit.reason]))
        parts.append(_listed("guard events", self.events))
        if self.advice:
            parts.append(_listed("advice", self.advice))
        return "\n\n".join(parts)

    def _summary(self) -> str:
        facts = f"{self.optimizer}, {self.mode} ({', '.join(self.backends) or 'no backend available'})"
        if not self.batches:
            return facts
        total = sum(batch.tensors for batch in self.batches)
        facts += f": {counted(total, 'tensor')} in {counted(self.calls_per_step, 'call')} a step"
        kernels = f", {counted(self.graphs, 'graph')} with {counted(self.kernels, 'kernel')}"
        return facts + (kernels if self.graphs else "")

    def _batches(self) -> str:
        if not self.batches:
            return "no step has been made yet"
        rows = [
            (b.tensors, f"{b.elements:,}", b.dtype, b.device, b.backend, "\n".join(b.units), b.calls)
            for b in self.batches
        ]
        headers = ("tensors", "elements", "dtype", "device", "backend", "unit", "calls")
        return tabulate(rows, headers=headers, colalign=("right", "right"))

    @property
    def bytes_per_element(self) -> dict[str, float]:
        """The bytes for each element of the parameters, by buffer: gradients, parameters, and each state."""
        elements = sum(batch.elements for batch in self.batches)
        used: Counter[str] = Counter()
        for batch in self.batches:
            used.update(batch.bytes)
        return {name: size / elements for name, size in used.items()} if elements else {}

    def _memory(self) -> str:
        used = self.bytes_per_element
        total = sum(used.values())
        parts = ", ".join(f"{name} {size:.3g}" for name, size in used.items())
        return f"bytes for each element: {total:.3g} ({parts})"

    def _units(self) -> str:
        rows = [(u.name, u.device, u.kernels, f"{u.seconds:.2f}" if u.seconds else "", u.source) for u in self.units]
        sources = [unit.source for unit in self.units]
        numbers = [f"{sources.count(s)} {s}" for s in (COMPILED, FROM_DISK, FROM_PROCESS) if s in sources]
        table = tabulate(rows, headers=("unit", "device", "kernels", "seconds", "from"), disable_numparse=True)
        return f"{table}\n{self.compile_seconds:.2f} s in all: {', '.join(numbers)}"


def _listed(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{title}:", *(f"  {line}" for line in lines)]) if lines else f"no {title}"
