"""The exceptions users may want to catch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compiled_optim.change import Change


LISTED = 10
"""So many changes are spelled out in a message."""


class BackendUnavailableError(RuntimeError):
    """A step was to be compiled where that cannot be done; the message says what is missing and what to do."""


class ReallocationError(RuntimeError):
    """A parameter was reallocated behind the optimizer's back and ``on_realloc="raise"`` is set.

    ``changes`` holds one :class:`~compiled_optim.change.Change` for each parameter. The step that raised has modified
    nothing: take one of the two ways out the message names.
    """

    def __init__(self, changes: Sequence[Change]) -> None:
        self.changes = tuple(changes)
        count = len(self.changes)
        lines = [f"{count} parameters were" if count > 1 else "a parameter was"]
        lines[0] += " reallocated behind the optimizer's back; nothing was updated"
        for change in self.changes[:LISTED]:
            lines += [f"  {change}", f"    likely by {change.cause}"]
        if count > LISTED:
            lines.append(f"  ... and {count - LISTED} more, in this exception's .changes")
        lines += [
            "two ways out:",
            "  - convert or replace parameters before the optimizer is constructed; converting back is no undoing,",
            "    because the memory is another",
            '  - set optimizer.on_realloc = "recompile", the default: it goes along with every change and logs it',
        ]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[ReallocationError], tuple[Sequence[Change]]]:
        return type(self), (self.changes,)


class RuleError(TypeError):
    """An update rule does not keep its contract: ``what`` it does, ``where``, and the ``remedy``."""

    def __init__(self, what: str, where: str, remedy: str) -> None:
        self.what, self.where, self.remedy = what, where, remedy
        super().__init__(f"{what}\n  at {where}\n  remedy: {remedy}")

    def __reduce__(self) -> tuple[type[RuleError], tuple[str, str, str]]:
        return type(self), (self.what, self.where, self.remedy)


class NesterovError(ValueError, TypeError):
    """Nesterov momentum without momentum or with dampening: torch raises ValueError, torch_npu documents TypeError."""
