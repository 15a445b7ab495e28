"""Run a compiled unit over a table of tensors: any number of them, of any sizes, in one native call.

The table holds the addresses of parameters and states, the addresses of the gradients of this step, and for each tensor
the row of its hyperparameters. A tensor without a gradient is skipped. ``table_driver.cpp`` reads the table.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_optim.backends.base import BoundArguments, Call, Shape, Unit
from compiled_optim.backends.table_passes import UPDATE_PASS, measure_pass
from compiled_optim.program import TensorLists
from compiled_optim.quantization import BLOCK
from compiled_optim.torch_private import data_ptr_function

CHUNK = 1 << 17
"""The number of elements in a chunk: enough to amortise a task, few enough for all threads and for the cache."""

FEWEST_ROWS = 16
"""The smallest number of rows in a chunk of a matrix that has more."""

PARALLEL_FROM = 1 << 17
"""The number of elements of all tensors from which two threads, including their start, are faster than one."""

CACHE_LINE = 64


class Task(NamedTuple):
    """One or all passes over a chunk of a tensor; the fields of ``Task`` in ``table_driver.cpp``.

    ``start`` and ``length`` count elements, or rows for tensors with two dimensions, and ``columns`` is the length of
    its rows. ``slot`` is the place of the sums over this chunk, and ``matrix`` the number of its matrix in a stack.
    """

    tensor: int
    start: int
    length: int
    columns: int
    slot: int
    passes: int
    matrix: int = 0


class Cuts(StrEnum):
    """What a chunk consists of; a string, so that it can be written to disk."""

    ELEMENTS = "elements or rows"
    MATRICES = "whole matrices"
    ROWS = "rows of a matrix"


@dataclass(frozen=True)
class TableForm:
    """What a library computes, and how tensors are cut for it.

    ``stages`` has the number of sums over each tensor in each pass that measures, ``known`` is the number of sums that
    a call is given, ``carries`` and ``column_carries`` those of values for each row and column that passes carry to
    later ones. The last pass may be missing (``updates``). ``means`` has for each mean over the rows of a matrix
    whether it is one for each column. ``cuts`` says of what chunks consist.
    """

    stages: Sequence[int]
    known: int
    carries: int
    column_carries: int
    updates: bool
    means: Sequence[bool]
    cuts: Cuts

    def cut(self, shapes: Sequence[Shape], chunk: int) -> list[list[Task]]:
        """Return the tasks of each tensor."""
        passes = all_passes(len(self.stages), self.updates)
        if self.cuts is Cuts.ROWS:
            return cut_matrices(shapes, chunk, passes)
        if self.cuts is Cuts.MATRICES:
            shapes = [(count, math.prod(sizes)) for count, *sizes in shapes]
        return cut(shapes, chunk, passes)

    def memory(self, shapes: Sequence[Shape], chunks: Sequence[Sequence[Task]]) -> TensorLists:
        """Return the lists of tensors that passes use in addition to those of the program.

        These are the means, the values to carry, and the sums of which means are computed, in the order of POINTERS in
        ``table_driver.cpp``.
        """
        if self.cuts is not Cuts.ROWS:
            return [_empty(shape[0] for shape in shapes) for _ in range(self.carries)]
        by_columns = [count * columns for count, _, columns in shapes]
        return [
            *(_empty(by_columns if each else (count for count, *_ in shapes)) for each in self.means),
            *(_empty(count * rows for count, rows, _ in shapes) for _ in range(self.carries)),
            *(_empty(by_columns) for _ in range(self.column_carries)),
            *(
                _empty(len(own) * (shape[2] if each else 1) for shape, own in zip(shapes, chunks, strict=True))
                for each in self.means
            ),
        ]


class TableUnit(Unit):
    """A library with the passes of a program, and the driver that runs them."""

    whole_blocks = False

    def __init__(self, module: Any, form: TableForm) -> None:
        self._module, self._form = module, form

    def bind(self, shapes: Sequence[Shape], lists: TensorLists, arguments: BoundArguments, chunk: int = CHUNK) -> Call:
        """Write the table. The call takes the gradients, None for a tensor that is skipped.

        It returns the sums over each tensor if there is no last pass, else None. ``chunk`` is the number of elements in
        a chunk.
        """
        chunks = self._form.cut(shapes, chunk)
        matrices = [(shape[0], shape[1]) if self._form.cuts is Cuts.ROWS else (1, 0) for shape in shapes]
        lists = [*lists, *self._form.memory(shapes, chunks)]
        return BoundTable(self._module, self._form, chunks, matrices, lists, arguments)


class BoundTable:
    """A table of tensors: the memory that ``Table`` in ``table_driver.cpp`` describes.

    ``runs`` counts how often it has run. Native code counts: a signal that arrives during the run raises
    KeyboardInterrupt before the next line of Python, which could not count it.
    """

    def __init__(
        self,
        module: Any,
        form: TableForm,
        chunks: Sequence[Sequence[Task]],
        matrices: Sequence[tuple[int, int]],
        lists: TensorLists,
        arguments: BoundArguments,
    ) -> None:
        self._fill, self._run, self._data_ptr = module.fill, module.run, data_ptr_function()
        self._lists = lists  # kept alive, because the table holds addresses only
        count, (rows, inv_scale, grad_scale, self._known_totals, *_) = len(chunks), arguments
        sums = sum(form.stages)
        self._totals = torch.zeros(count, form.known + sums, dtype=torch.float64, device="cpu")
        self._known, self._updates = form.known, form.updates
        self._chunks = chunks
        slots = [0, *accumulate(map(len, chunks))]
        addresses = [[tensor.data_ptr() for tensor in tensors] for tensors in lists]
        self.runs = array("q", [0])
        self._pointers = array("q", [each for own in zip([0] * count, *addresses, strict=True) for each in own])
        self._grads = _address(self._pointers)
        self._tensors = {
            "pointers": self._pointers,
            "matrices": array("q", [count for count, _ in matrices]),
            "rows": array("q", [rows for _, rows in matrices]),
            "row": array("q", bytes(8 * count)) if rows is None else rows.row_of,
            "scalars": None if rows is None else rows.tensor,
            "inv_scale": inv_scale,
            "grad_scale": grad_scale,
            "columns": array("q", [own[0].columns if own else 0 for own in chunks]),
            "slots": array("q", slots),
            "partials": array("d", bytes(8 * slots[-1] * sums)),
            "totals": self._totals,
            "progress": array("q", bytes(8 * count)),
            "ready": array("q", bytes(8 * count)),
            "runs": self.runs,
        }
        self._sizes = [sum(task.length * task.columns for task in own) for own in chunks]
        self._parallel = sum(self._sizes) >= PARALLEL_FROM
        (serial,) = queues(self._sizes, self._chunks, 1)
        self._serial = _flat(serial)
        self._threads = 0

    def __call__(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """Run the unit on all tensors that have a gradient."""
        threads = torch.get_num_threads() if self._parallel else 1
        if threads != self._threads:
            self._write_table(threads)
        self._fill(grads, self._grads, self._data_ptr)
        if self._known:
            assert self._known_totals is not None
            self._totals[:, : self._known] = self._known_totals.T
        self._run(self._place)
        return None if self._updates else self._totals[:, self._known :].T

    def _write_table(self, threads: int) -> None:
        """Write the table for a number of threads."""
        self._threads = 0  # an interrupt must not leave a table of which a part is freed
        self._queues: dict[str, array[int] | None] = {"queued": None, "queues": None, "cursors": None}
        if threads > 1:
            own = queues(self._sizes, self._chunks, threads)
            self._queues = {
                "queued": _flat([task for queue in own for task in queue]),
                "queues": array("q", [0, *accumulate(map(len, own))]),
                "cursors": array("q", bytes(CACHE_LINE * (threads + 1))),
            }
        addresses = {name: _address(memory) for name, memory in {**self._queues, **self._tensors}.items()}
        addresses["cursors"] += -addresses["cursors"] % CACHE_LINE
        tasks = len(self._serial) // len(Task._fields)
        self._table = array("q", [len(self._sizes), tasks, _address(self._serial), threads, *addresses.values()])
        self._place, self._threads = _address(self._table), threads


def _empty(sizes: Iterable[int]) -> list[Tensor]:
    return [torch.empty(size, dtype=torch.float64, device="cpu") for size in sizes]


def _flat(tasks: Sequence[Task]) -> array[int]:
    return array("q", chain.from_iterable(tasks))


def _address(memory: array[Any] | Tensor | None) -> int:
    if memory is None:
        return 0
    return memory.data_ptr() if isinstance(memory, Tensor) else memory.buffer_info()[0]


def all_passes(stages: int, updates: bool) -> int:
    """Return the passes of a program with this number of stages, which may have no last pass, as bits."""
    return sum(map(measure_pass, range(stages))) | (UPDATE_PASS if updates else 0)


def cut(shapes: Sequence[Shape], chunk: int, passes: int) -> list[list[Task]]:
    """Cut each tensor into chunks of about ``chunk`` elements; return a task for each. Rows and blocks are not cut.

    The length depends on nothing else, so the sums over a tensor are always added in the same order.
    """
    chunks = []
    slot = 0
    for i, shape in enumerate(shapes):
        count, columns, *ends = (*shape, 1) if len(shape) == 1 else shape
        length = max(1, chunk // max(columns, 1))
        starts = range(0, count, length) if count * columns else ()
        own = [Task(i, start, min(length, count - start), columns, slot + n, passes) for n, start in enumerate(starts)]
        own += [Task(i, count, 1, end, slot + len(own), passes) for end in ends if end]
        chunks.append(own)
        slot += len(own)
    return chunks


def cut_matrices(shapes: Sequence[Shape], chunk: int, passes: int) -> list[list[Task]]:
    """Cut each matrix of a stack into chunks of rows, of about ``chunk`` elements; return the tasks of each stack.

    A chunk has a sum for each column, so it should have some rows.
    """
    chunks = []
    slot = 0
    for i, (count, rows, columns) in enumerate(shapes):
        length = max(FEWEST_ROWS, chunk // max(columns, 1))
        starts = [(m, start) for m in range(count if columns else 0) for start in range(0, rows, length)]
        chunks.append(
            [
                Task(i, m * rows + start, min(length, rows - start), columns, slot + n, passes, m)
                for n, (m, start) in enumerate(starts)
            ]
        )
        slot += len(starts)
    return chunks


def in_blocks(shape: Shape) -> Shape:
    """Return the shape in which a table sees a 1-D tensor whose blocks have numbers of their own.

    It has the number of blocks, their length, and the number of elements in the last, shorter block.
    """
    count, end = divmod(shape[0], BLOCK)
    return count, BLOCK, end


def queues(sizes: Sequence[int], chunks: Sequence[Sequence[Task]], threads: int) -> list[list[Task]]:
    """Return the tasks of each thread, in order: large tensors first.

    A tensor with enough chunks is divided between all threads. Another one belongs to the thread with the least work.
    All passes over a tensor of one chunk are one task. The passes over a larger one come one after the other, each from
    the end where the one before has stopped, which is still in the cache. ``sizes`` are the numbers of elements of the
    tensors.
    """
    found: list[list[Task]] = [[] for _ in range(threads)]
    work = [0] * threads
    for size, own in sorted(zip(sizes, chunks, strict=True), key=itemgetter(0), reverse=True):
        if len(own) >= threads > 1:
            parts = {t: own[len(own) * t // threads : len(own) * (t + 1) // threads] for t in range(threads)}
        else:
            parts = {work.index(min(work)): own}
        for thread, part in parts.items():
            work[thread] += size // len(parts)
            if len(own) < 2:
                found[thread] += part
                continue
            for number, passes in enumerate(_in_order(own[0].passes)):
                found[thread] += [task._replace(passes=passes) for task in (reversed(part) if number % 2 else part)]
    return found


def _in_order(passes: int) -> list[int]:
    """Return the single passes of several, the last pass of a program at the end."""
    measures = [1 << bit for bit in range(1, passes.bit_length()) if passes >> bit & 1]
    return [*measures, *([UPDATE_PASS] if passes & UPDATE_PASS else [])]
