"""The interface of a backend: which units a batch needs, and one call that runs the batch.

To write one, subclass :class:`Backend` or one of its helpers (``lanes.LaneBackend``, ``whole_lists.WholeListBackend``)
and register an instance with ``compiled_optim.backends.register``, or publish it under the entry-point group
``compiled_optim.backends``.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from compiled_optim.modes import outside_of_modes
from compiled_optim.program import Program, TensorLists

Shape = tuple[int, ...]
MatrixFunction = Callable[[Tensor], Tensor]
"""Maps a stack of matrices; see ``engine.matrix_map``. It must be hashable."""

Layout = Literal["tensors", "flat"]


class Availability(NamedTuple):
    """The result of :meth:`Backend.available`: true or false and, if false, what is missing and the remedy."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


class Lane(NamedTuple):
    """The form of a call: the variant of the code, and the largest number of tensors (0 for any number).

    ``shapes`` are the shapes of the tensors if they are compiled in, else empty. A lane of the CPU or of CUDA takes any
    size in the first dimension, and the first size in its ``shapes`` has no meaning.
    """

    kind: str
    width: int = 0
    shapes: tuple[Shape, ...] = ()

    def __str__(self) -> str:
        return self.kind if self.width == 1 else f"{self.kind}×{self.width or 'all'}"


class ArgumentSpec(NamedTuple):
    """A tensor that a program takes in addition to its lists: a field of :class:`~compiled_optim.program.Arguments`."""

    name: str
    dtype: torch.dtype
    shape: Shape


ONE_MINUS = (1.0).__sub__


class ScalarRows:
    """The hyperparameters of a batch: a row for each group and step count, and the row of each tensor.

    A row of ``tensor`` holds all values, then one minus each value. Both are computed in double precision and rounded
    once. Tensor and ``row_of`` are refilled in place; there are at most as many rows as tensors.
    """

    def __init__(self, count: int, tensors: int, dtype: torch.dtype) -> None:
        self.values: Sequence[Sequence[float]] = []
        self.row_of = array("q", bytes(8 * tensors))
        self._typecode = "d" if dtype == torch.float64 else "f"
        # at least one element: a rule may have no scalars, but frombuffer needs memory
        self._memory = array(self._typecode, bytes((2 * count * tensors or 1) * dtype.itemsize))
        with outside_of_modes():
            self.tensor = torch.frombuffer(self._memory, dtype=dtype)[: 2 * count * tensors].view(tensors, 2 * count)

    def fill(self, values: Sequence[Sequence[float]]) -> None:
        """Write this step's values, row by row."""
        self.values = values
        numbers: list[float] = []
        for row in values:
            numbers += row
            numbers += map(ONE_MINUS, row)
        self._memory[: len(numbers)] = array(self._typecode, numbers)  # type: ignore[arg-type]


class BoundArguments(NamedTuple):
    """The memory a bound call reads its arguments from. It is rewritten before each step.

    ``inv_scale`` is a 0-dim tensor. ``grad_scale`` has an element for each row of ``scalars``. ``totals`` has a row for
    each sum, stage by stage, and a column for each tensor. ``row_segments`` has the segment of each row of a flat
    buffer, and ``mask`` is false for padding. They do not change. ``found_inf`` is a 0-dim tensor: if it is not 0, the
    call changes nothing.
    """

    scalars: ScalarRows | None = None
    inv_scale: Tensor | None = None
    grad_scale: Tensor | None = None
    totals: Tensor | None = None
    row_segments: Tensor | None = None
    mask: Tensor | None = None
    found_inf: Tensor | None = None

    def of_row(self, row: int) -> dict[str, Tensor]:
        """Return the arguments that are not None, as tensors by name, with the scalars of one row."""
        scalars = None if self.scalars is None else self.scalars.tensor[row]
        scale = None if self.grad_scale is None else self.grad_scale[row]
        named = {**self._asdict(), "scalars": scalars, "grad_scale": scale}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@dataclass(frozen=True)
class Signature:
    """Everything a compiled unit assumes. A unit runs only on inputs with its signature.

    ``device`` includes the index if the device has one, because generated code may contain it.
    """

    program: Program
    device: str
    rank: int
    dtypes: tuple[torch.dtype, ...]
    arguments: tuple[ArgumentSpec, ...]
    lane: Lane

    def __str__(self) -> str:
        dtypes = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        rows = ", rows" if self.rank > 1 else ""
        variant = "".join(f", {word}" for word in self.program.variant)
        return f"{self.program.name}[{'+'.join(dtypes)}{rows}{variant}, {self.lane}]"


class UnitCall(NamedTuple):
    """One call of a unit: its signature, and the indices of its tensors in the batch."""

    signature: Signature
    indices: Sequence[int]


@dataclass
class Batch:
    """A program and the tensors it runs on, which share device, dtypes and number of dimensions.

    A backend compiles and binds batches. ``dtypes`` has one entry for each list, gradients first. ``shapes`` are the
    shapes of the working views of the tensors. The tensors of a batch that ``is_flat`` are parts of flat buffers. Each
    is passed to a call of its own, and its shape is one of a few.
    """

    backend: Backend
    program: Program
    device: str
    dtypes: tuple[torch.dtype, ...]
    shapes: Sequence[Shape]
    arguments: tuple[ArgumentSpec, ...] = ()
    is_flat: bool = False

    @cached_property
    def calls(self) -> Sequence[UnitCall]:
        """The calls the backend makes for this batch."""
        return self.backend.units(self)

    def bind(self, lists: TensorLists = (), arguments: BoundArguments = BoundArguments()) -> BoundBatch:  # noqa: B008
        """Bind the parameters, the states and the arguments; return a callable that takes the gradients."""
        if not any(spec.name == "totals" for spec in self.arguments):
            arguments = arguments._replace(totals=None)
        return self.backend.bind(self, lists, arguments)


Call = Callable[[Sequence[Any]], Tensor | None]


class Unit(ABC):
    """A compiled program for one signature."""

    graphs: int = 1
    kernels: int = 0
    seconds: float = 0.0
    from_disk: bool = False
    limit: str = ""
    """Why the unit takes its tensors one by one; empty if it does not."""

    @abstractmethod
    def bind(self, shapes: Sequence[Shape], lists: TensorLists, arguments: BoundArguments) -> Call:
        """Bind all lists except the gradients; return a call that takes the gradients, in the given shapes."""


class BoundCall(NamedTuple):
    """A unit bound to memory: ``pick`` selects its gradients from those of the batch, ``call`` runs it on them.

    ``pick`` may also return all gradients, with None in place of those that are not for this unit.
    """

    unit: Unit
    signature: Signature
    pick: Callable[[Sequence[Any]], Sequence[Any]]
    call: Call


class BoundBatch:
    """A batch bound to memory. Call it with the gradients of all its tensors; None skips a tensor.

    ``runs`` counts how often each call has updated its tensors. After an exception, such as KeyboardInterrupt, it tells
    which tensors are updated and which are not.
    """

    def __init__(self, calls: Sequence[BoundCall]) -> None:
        self.calls = calls
        self.runs = array("q", bytes(8 * len(calls)))

    def __call__(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """Run the program; return the result that :attr:`Program.result` declares."""
        for number, (_, _, pick, call) in enumerate(self.calls):
            call(pick(grads))
            self.runs[number] += 1
        return None

    def finish(self, runs: Sequence[int], grads: Sequence[Tensor | None]) -> None:
        """Make the calls that were not made since :attr:`runs` had the given values."""
        for number, (_, _, pick, call) in enumerate(self.calls):
            if self.runs[number] == runs[number]:
                call(pick(grads))
                self.runs[number] += 1

    def updated_since(self, runs: Sequence[int], tensors: int) -> list[bool]:
        """Return for each of its tensors whether it was updated since :attr:`runs` had the given values."""
        updated = [False] * tensors
        for call, before, now in zip(self.calls, runs, self.runs, strict=True):
            for i in call.pick(range(tensors)) if now != before else ():
                if i is not None:
                    updated[i] = True
        return updated


class Backend(ABC):
    """Compiles programs for one kind of device, and caches the units, one for each signature."""

    name: str
    devices: tuple[str, ...] = ()
    compiles: bool = True
    seconds_per_unit: float = 5.0
    """The approximate compile time of a unit, for the log line before compilation."""
    takes_rows: bool = False
    """Whether one call takes tensors with different rows of scalars, and skips those without a gradient. If not, a
    batch contains parameters of one group and one step count, all with a gradient."""
    layouts: tuple[Layout, ...] = ("tensors",)
    """How parameters and states may lie in memory, the default first: "tensors" leaves parameters where they are,
    "flat" moves them into flat buffers. A backend with "flat" takes batches with ``is_flat``."""
    refused_storages: tuple[str, ...] = ("8bit",)
    """The ways to keep tensors that this backend cannot compile: "8bit" or "stochastic"."""
    whole_blocks: bool = False
    """Whether only whole blocks can be in 8 bits, and only for rules without sums. Other tensors stay in float32."""
    skips_on_device: bool = False
    """Whether programs that unscale gradients take ``found_inf``, so that the host need not read it."""
    by_address: bool = False
    """Whether calls use only the addresses of tensors, so that these are not viewed in the shapes of the batch."""

    def __init__(self) -> None:
        self._units: dict[Signature, Unit] = {}
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> Backend:
        """Return the backend itself: copies of an optimizer share it."""
        return self

    def __repr__(self) -> str:
        return f"<backend {self.name!r}>"

    @abstractmethod
    def available(self) -> Availability:
        """Report whether this backend works on this machine. Must not raise, and must be fast after the first call."""

    @abstractmethod
    def units(self, batch: Batch) -> Sequence[UnitCall]:
        """Return the calls that run this batch. A tensor without elements needs no call."""

    @abstractmethod
    def bind(self, batch: Batch, lists: TensorLists, arguments: BoundArguments) -> BoundBatch:
        """Return one callable for the batch, with everything except the gradients bound."""

    @abstractmethod
    def compile(self, signature: Signature) -> Unit:
        """Compile the unit for a signature. It does not get the user's tensors."""

    def check_step(self) -> None:  # noqa: B027 -- optional
        """Raise if a step cannot be made now. It is called before each step, before anything is changed."""

    def clips_at_once(self, dtype: torch.dtype, clips: int) -> bool:
        """Return True if :meth:`clip` works for programs that compute in ``dtype``, and for this number of clips."""
        return False

    def clip(
        self,
        squares: Tensor,
        limits: Sequence[tuple[float, float]],
        maximize: bool,
        inv_scale: Tensor | None,
        grad_scale: Tensor,
    ) -> Tensor:
        """Write the factor that clips gradients by their norm into ``grad_scale``, in one launch; return the norm.

        Args:
            squares: numbers whose sum is the square of the norm.
            limits: for each clip the largest norm, and what is added to the norm.
            maximize: change the sign of the factor.
            inv_scale: multiply the norm by this number, if it is not None.
            grad_scale: where to write the factor, into each element.
        """
        raise NotImplementedError

    def lower_map(self, function: MatrixFunction, stack: Tensor) -> MatrixFunction:
        """Return a function that computes the same for stacks of matrices like ``stack``.

        The default is the function itself: its matrix products are calls of the library for the device, such as cuBLAS,
        and nothing has to be compiled. A backend may compile it for the shape of the stack.
        """
        return function

    def cache_directory(self) -> Path | None:
        """Return the directory in which compiled units are kept for other processes, or None."""
        return None

    def is_cached(self, signature: Signature) -> bool:
        """Return True if the unit for this signature seems to be on disk, so that it will be loaded."""
        return False

    def needs_compile(self, signature: Signature) -> bool:
        """Return True if :meth:`get_unit` will compile this unit or load it from disk, which takes time."""
        return self.compiles and signature not in self._units

    def get_unit(self, signature: Signature) -> Unit:
        """Return the unit for this signature; compile it on first use."""
        unit = self._units.get(signature)
        if unit is not None:
            return unit
        with self._lock:
            if signature not in self._units:
                with outside_of_modes():
                    self._units[signature] = self.compile(signature)
            return self._units[signature]
