"""Records of the units an optimizer uses: compile time, source, and the reason for each recompilation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from compiled_optim.backends import Lane, Signature, Unit

DEPENDENT_FIELDS = ("name", "arguments", "dtype", "storages")
"""Fields of signatures and programs that are determined by other fields."""

COMPILED, FROM_DISK, FROM_PROCESS = "compiled now", "disk cache", "this process"


@dataclass(frozen=True)
class UnitReport:
    """One unit. ``seconds`` is the time this optimizer waited for it.

    ``source`` is "compiled now", "disk cache", or "this process" if another optimizer has compiled it before.
    ``reason`` is set if the unit was compiled after the first step, ``limit`` if it takes one tensor at a time.
    """

    name: str
    device: str
    kernels: int
    seconds: float
    source: str
    reason: str = ""
    limit: str = ""


class UnitLog:
    """The units an optimizer has used, each once."""

    def __init__(self) -> None:
        self._units: dict[Signature, UnitReport] = {}

    def record(self, signature: Signature, unit: Unit, new: bool, late: bool) -> None:
        """Record a unit. ``new``: it was compiled or loaded for this optimizer; ``late``: after its first step."""
        if signature in self._units:
            return
        source = FROM_PROCESS if not new else FROM_DISK if unit.from_disk else COMPILED
        self._units[signature] = UnitReport(
            name=str(signature),
            device=signature.device,
            kernels=unit.kernels,
            seconds=unit.seconds if new else 0.0,
            source=source,
            reason=recompile_reason(signature, self._units) if new and late else "",
            limit=unit.limit,
        )

    def reports(self) -> tuple[UnitReport, ...]:
        """Return all units, in the order of their first use."""
        return tuple(self._units.values())


def recompile_reason(signature: Signature, known: Iterable[Signature]) -> str:
    """Return the differences of a signature from the most similar known one, with old and new values."""
    differences = [_differences(signature, other) for other in known]
    if not differences:
        return "the first parameters with a gradient"
    # prefer a known unit with the same program and lane: its differences explain more
    least = min(differences, key=lambda found: sum(10 if name in ("program", "lane") else 1 for name in found))
    return "; ".join(f"{name} {change}" for name, change in least.items())


def _differences(new: Any, old: Any) -> dict[str, str]:
    """Return the fields that differ, with old and new values."""
    if type(new) is not type(old):
        return {"program": f"{old.name} → {new.name}"}
    found: dict[str, str] = {}
    for field in fields(new):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if is_dataclass(after) and before != after:
            found |= _differences(after, before)
        elif _text(before) != _text(after) and field.name not in DEPENDENT_FIELDS:
            found[field.name] = f"{_text(before)} → {_text(after)}"
    return found


def _text(value: object) -> str:
    if isinstance(value, Lane):
        return str(value) + (" of its own shapes" if value.shapes else "")
    if isinstance(value, tuple) and value and all(isinstance(item, torch.dtype) for item in value):
        return "+".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in value))
    if isinstance(value, tuple):
        return ", ".join(f"{item[0]}={item[1]}" if isinstance(item, tuple) else str(item) for item in value) or "none"
    return getattr(value, "__qualname__", str(value))
