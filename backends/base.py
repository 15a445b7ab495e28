"""What a backend is: how lists are cut into calls, and how a call is compiled.

To write one, subclass :class:`Backend` and register an instance (``compiled_optim.backends.register``), or publish it
under the entry-point group ``compiled_optim.backends``.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_optim.program import Program, TensorLists


class Availability(NamedTuple):
    """Whether a backend can be used here and, if not, what is missing and what to do. Falsy if it cannot."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


class Lane(NamedTuple):
    """The shape of a call: how many tensors it takes at most (0 for any number) and which variant of the code.

    ``shapes`` are those of its tensors if they are compiled in, else empty.
    """

    kind: str
    width: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Signature:
    """Everything a compiled unit assumes. A unit is never run on anything else.

    ``device`` has its index where there is one: generated code may name it.
    """

    program: Program
    device: str
    rank: int
    dtypes: tuple[torch.dtype, ...]
    shared: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    lane: Lane

    def __str__(self) -> str:
        dtypes = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        rows = ", rows" if self.rank > 1 else ""
        variant = "".join(f", {word}" for word in self.program.variant)
        return f"{self.program.name}[{'+'.join(dtypes)}{rows}{variant}, {self.lane.kind}×{self.lane.width or 'all'}]"


Call = Callable[[Sequence[Tensor]], Tensor | None]


class Unit(ABC):
    """A compiled program for one signature."""

    graphs: int = 1
    kernels: int = 0
    seconds: float = 0.0
    from_disk: bool = False

    @abstractmethod
    def bind(self, shapes: Sequence[tuple[int, ...]], lists: TensorLists, shared: Sequence[Tensor]) -> Call:
        """Fix all lists but the gradients; the returned call takes those, in the given shapes."""


class Backend(ABC):
    """Compiles programs for the devices of one kind and keeps the units it made, one for each signature."""

    name: str
    devices: tuple[str, ...] = ()
    compiles: bool = True
    seconds_per_unit: float = 5.0
    """About how long a unit takes to compile, to be told before."""
    by_address: bool = False
    """Whether units only take the address of a gradient, so that nobody has to view it in the shape of its lane."""

    def __init__(self) -> None:
        self._units: dict[Signature, Unit] = {}
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> Backend:
        """A backend is a service, not data: copies of an optimizer share it."""
        return self

    def __reduce__(self) -> tuple[Callable[[str], Backend], tuple[str]]:
        """Pickle by name, for the same reason."""
        from compiled_optim.backends.registry import get

        return get, (self.name,)

    def __repr__(self) -> str:
        return f"<backend {self.name!r}>"

    @abstractmethod
    def available(self) -> Availability:
        """Whether this machine can compile and run here, and if not, why; never raises, cheap after the first time."""

    @abstractmethod
    def cut(self, shapes: Sequence[tuple[int, ...]]) -> list[tuple[Lane, list[int]]]:
        """Cut a list of tensors, given by their shapes, into calls: the lane and the indices of each.

        A tensor without elements needs no call.
        """

    @abstractmethod
    def compile(self, signature: Signature) -> Unit:
        """Compile the unit for a signature, without touching any of the user's tensors."""

    def cache(self) -> Path | None:
        """The directory where other processes find what this one compiled, if there is one."""
        return None

    def keeps(self, signature: Signature) -> bool:
        """Whether the unit for this signature seems to be in the cache, so that it is loaded instead of compiled."""
        return False

    def compiles_anew(self, signature: Signature) -> bool:
        """Whether asking for the unit of this signature will compile or load it, which may take a while."""
        return self.compiles and signature not in self._units

    def unit(self, signature: Signature) -> Unit:
        """The unit for this signature, compiled if this is the first time it is asked for."""
        with self._lock:
            if signature not in self._units:
                self._units[signature] = self.compile(signature)
            return self._units[signature]
