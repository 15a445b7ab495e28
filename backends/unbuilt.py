"""What the backends that cannot compile yet have in common: an honest answer, and the way out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from compiled_optim.backends.base import Availability, Backend, Lane, Signature, Unit
from compiled_optim.errors import BackendUnavailableError


class UnbuiltBackend(Backend):
    """A backend that is registered for its devices, but whose :meth:`available` is never true."""

    @abstractmethod
    def available(self) -> Availability:
        """Say what is missing."""

    def missing(self, what: str) -> Availability:
        """The answer, with the remedy."""
        return Availability(False, f"{what}; pass compile=False to run the same step eagerly on this device")

    def cut(self, sizes: Sequence[int]) -> list[tuple[Lane, list[int]]]:
        """Refuse."""
        raise BackendUnavailableError(self.available().reason)

    def compile(self, signature: Signature) -> Unit:
        """Refuse."""
        raise BackendUnavailableError(self.available().reason)
