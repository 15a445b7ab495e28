"""The units an optimizer calls: what each cost, where it came from, and why one was compiled after the first step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from compiled_optim.backends import Lane, Signature, Unit

DEPENDENT_FIELDS = ("name", "arguments", "dtype", "storages")
"""Fields of signatures and programs that follow from others."""

COMPILED, FROM_DISK, FROM_PROCESS = "compiled now", "disk cache", "this process"


@dataclass(frozen=True)
class UnitReport:
    """One unit. ``seconds`` is what this optimizer waited for it; ``reason`` is set if that was after its first step.

    ``source`` is "compiled now", "disk cache" or "this process", if another optimizer had it compiled before.
    """

    name: str
    device: str
    kernels: int
    seconds: float
    source: str
    reason: str = ""


class UnitLog:
    """The units an optimizer has asked for, each once."""

    def __init__(self) -> None:
        self._units: dict[Signature, UnitReport] = {}

    def record(self, signature: Signature, unit: Unit, new: bool, late: bool) -> None:
        """Record a unit: whether it was compiled or loaded for this optimizer, and whether after its first step."""
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
        )

    def reports(self) -> tuple[UnitReport, ...]:
        """Return all units, in the order they were first asked for."""
        return tuple(self._units.values())


def recompile_reason(signature: Signature, known: Iterable[Signature]) -> str:
    """Return how a signature differs from the most similar known one, before and after."""
    differences = [_differences(signature, other) for other in known]
    if not differences:
        return "the first parameters with a gradient"
    # how a batch is cut says little; a unit for the same kind of call says why
    least = min(differences, key=lambda found: sum(10 if name in ("program", "lane") else 1 for name in found))
    return "; ".join(f"{name} {change}" for name, change in least.items())


def _differences(new: Any, old: Any) -> dict[str, str]:
    """Return the fields that differ, and how."""
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
        return f"{value.kind}×{value.width or 'all'}" + (" of its own shapes" if value.shapes else "")
    if isinstance(value, tuple) and value and all(isinstance(item, torch.dtype) for item in value):
        return "+".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in value))
    if isinstance(value, tuple):
        return ", ".join(f"{item[0]}={item[1]}" if isinstance(item, tuple) else str(item) for item in value) or "none"
    return getattr(value, "__qualname__", str(value))
