"""The exceptions users may want to catch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compiled_optim.guard import Change


class BackendUnavailableError(RuntimeError):
    """A step was to be compiled where that cannot be done; the message says what is missing and what to do."""


class ReallocationError(RuntimeError):
    """A parameter was reallocated behind the optimizer's back and ``on_realloc="raise"`` is set.

    ``changes`` holds one :class:`~compiled_optim.guard.Change` for each thing that changed. The step that raised
    has modified nothing: undo the change, or construct a new optimizer, and go on.
    """

    def __init__(self, changes: Sequence[Change]) -> None:
        self.changes = tuple(changes)
        listing = "\n".join(f"  {change}" for change in self.changes)
        super().__init__(
            f"parameters were reallocated after the optimizer had bound them:\n{listing}\n"
            "Nothing was updated. Either keep the parameters where they are (move or cast the model before the "
            'optimizer is constructed), or pass on_realloc="recompile" to let the optimizer follow them.'
        )


class NesterovError(ValueError, TypeError):
    """Nesterov momentum without momentum or with dampening: torch raises ValueError, torch_npu documents TypeError."""
