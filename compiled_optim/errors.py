"""The exceptions users may want to catch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

MAX_LISTED_CHANGES = 10
"""The number of changes listed in the message of a ReallocationError."""


class BackendUnavailableError(RuntimeError):
    """A step cannot be compiled here. The message says what is missing and what to do."""


class DescribesChange(Protocol):
    """One reallocated parameter: ``str()`` describes the change, ``cause`` is the code that likely caused it."""

    @property
    def cause(self) -> str:
        """The code that most often causes this kind of change."""


class ReallocationError(RuntimeError):
    """A parameter was reallocated and the optimizer has ``on_realloc="raise"``.

    ``changes`` holds one :class:`~compiled_optim.guard.change.Change` for each parameter. The step that raised has
    modified nothing.
    """

    def __init__(self, changes: Sequence[DescribesChange]) -> None:
        self.changes = tuple(changes)
        count = len(self.changes)
        lines = [f"{count} parameters were" if count > 1 else "a parameter was"]
        lines[0] += f" reallocated since the optimizer last saw {'them' if count > 1 else 'it'}; nothing was updated"
        for change in self.changes[:MAX_LISTED_CHANGES]:
            lines += [f"  {change}", f"    likely by {change.cause}"]
        if count > MAX_LISTED_CHANGES:
            lines.append(f"  ... and {count - MAX_LISTED_CHANGES} more, in this exception's .changes")
        lines += [
            "two ways out:",
            "  - convert or replace parameters before the optimizer is constructed; converting back does not help,",
            "    because it allocates new storage",
            '  - set optimizer.on_realloc = "recompile", the default: the optimizer follows every change and logs it',
        ]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[ReallocationError], tuple[Sequence[DescribesChange]]]:
        return type(self), (self.changes,)


class RuleError(TypeError):
    """An update rule has an error: ``what`` is wrong, ``where`` in the code, and the ``remedy``."""

    def __init__(self, what: str, where: str, remedy: str) -> None:
        self.what, self.where, self.remedy = what, where, remedy
        super().__init__(f"{what}\n  at {where}\n  remedy: {remedy}")

    def __reduce__(self) -> tuple[type[RuleError], tuple[str, str, str]]:
        return type(self), (self.what, self.where, self.remedy)


class NesterovError(ValueError, TypeError):
    """Nesterov momentum without momentum or with dampening: torch raises ValueError, torch_npu documents TypeError."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if there is no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
