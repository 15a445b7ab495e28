"""Run a compiled unit over a table of tensors: any number of them, of any sizes, in one native call.

The table holds the addresses of parameters and states, the addresses of the gradients of this step, and for each tensor
the row of its hyperparameters. A tensor without a gradient is skipped. ``table_driver.cpp`` reads the table.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_optim.backends.base import BoundArguments, Call, Shape, Unit
from compiled_optim.program import TensorLists

CHUNK = 1 << 15
"""The number of elements in a chunk: enough to amortise a task, few enough for all threads and for the cache."""

PARALLEL_FROM = 1 << 17
"""The number of elements of all tensors from which two threads, including their start, are faster than one."""

MEASURE_PASS, UPDATE_PASS = 1, 2

DATA_PTR: int = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
"""The address of the function with which Inductor's generated code reads the address of a tensor."""


class Task(NamedTuple):
    """One or both passes over a chunk of a tensor; the fields of ``Task`` in ``table_driver.cpp``.

    ``start`` and ``length`` count elements, or rows for tensors with two dimensions. ``slot`` is the place of the sums
    over this chunk.
    """

    tensor: int
    start: int
    length: int
    slot: int
    passes: int


class TableUnit(Unit):
    """A library with the two passes of a program, of which one may be missing, and the driver that runs them."""

    def __init__(self, module: Any, sums: int, passes: int) -> None:
        self._module = module
        self._sums, self._passes = sums, passes

    def bind(self, shapes: Sequence[Shape], lists: TensorLists, arguments: BoundArguments, chunk: int = CHUNK) -> Call:
        """Write the table. The call takes the gradients, None for a tensor that is skipped.

        It returns the sums over each tensor if there is a first pass only, else None.
        """
        fill, run = self._module.fill, self._module.run
        count = len(shapes)
        addresses = [[tensor.data_ptr() for tensor in tensors] for tensors in lists]
        pointers = array("q", [each for own in zip([0] * count, *addresses, strict=True) for each in own])
        tasks = list(cut(shapes, chunk, self._passes))
        slots = list(first_slots(shapes, chunk))
        totals = arguments.totals
        if totals is None:
            totals = torch.zeros(count, self._sums, dtype=torch.float64, device="cpu")
        rows, scale = arguments.scalars, arguments.grad_scale
        memory = {
            "task": array("q", [field for task in tasks for field in task]),
            "pointers": pointers,
            "row": None if rows is None else rows.row_of,
            "scalars": None if rows is None else rows.tensor,
            "grad_scale": scale,
            "columns": array("q", [shape[1] if len(shape) > 1 else 1 for shape in shapes]),
            "slots": array("q", slots),
            "partials": array("d", bytes(8 * slots[-1] * self._sums)),
            "totals": totals,
            "progress": array("q", bytes(8 * count)),
        }
        if rows is None:
            memory["row"] = array("q", bytes(8 * count))
        table = array("q", [count, len(tasks), *map(_address, memory.values())])
        keep = (table, memory, lists)
        place, target = _address(table), _address(pointers)
        parallel = sum(map(math.prod, shapes)) >= PARALLEL_FROM
        result = totals if self._passes == MEASURE_PASS else None

        def call(grads: Sequence[Tensor | None]) -> Tensor | None:
            fill(grads, target, DATA_PTR)
            run(place, torch.get_num_threads() if parallel else 1)
            return result

        call.keep = keep  # type: ignore[attr-defined]
        return call


def _address(memory: array[Any] | Tensor | None) -> int:
    if memory is None:
        return 0
    return memory.data_ptr() if isinstance(memory, Tensor) else memory.buffer_info()[0]


def chunk_length(shape: Shape, chunk: int) -> int:
    """Return the length of the chunks of a tensor: a number of elements, or of rows, which are never cut."""
    return chunk if len(shape) == 1 else max(1, chunk // max(shape[1], 1))


def first_slots(shapes: Sequence[Shape], chunk: int) -> Iterator[int]:
    """Yield the number of the first chunk of each tensor, and the number of all chunks."""
    total = 0
    for shape in shapes:
        yield total
        total += 0 if math.prod(shape) == 0 else -(-shape[0] // chunk_length(shape, chunk))
    yield total


def cut(shapes: Sequence[Shape], chunk: int, passes: int) -> Iterator[Task]:
    """Yield the tasks of a step in the order in which threads take them: large tensors first.

    A tensor of one chunk is measured and updated in one task. The chunks of a larger one are all measured before one is
    updated. In between come the chunks of the next tensor to be measured, so that no thread has to wait.
    """
    slots = list(first_slots(shapes, chunk))
    order = sorted(range(len(shapes)), key=lambda i: -math.prod(shapes[i]))
    two_passes = passes == MEASURE_PASS | UPDATE_PASS
    waiting: list[Task] = []
    for i in order:
        length = chunk_length(shapes[i], chunk)
        starts = range(0, shapes[i][0], length) if slots[i + 1] > slots[i] else ()
        chunks = [
            Task(i, start, min(length, shapes[i][0] - start), slots[i] + number, passes)
            for number, start in enumerate(starts)
        ]
        if two_passes and len(chunks) > 1:
            yield from (task._replace(passes=MEASURE_PASS) for task in chunks)
            yield from waiting
            waiting = [task._replace(passes=UPDATE_PASS) for task in chunks]
        else:
            yield from waiting
            waiting = []
            yield from chunks
    yield from waiting
