"""Run a compiled unit over a table of tensors on a GPU: one launch for each pass, for any number of tensors.

The table holds the addresses of parameters and states, and the tasks: which chunk of which tensor a program of the
launch updates. It is on the device. The addresses of the gradients of a step and the rows of hyperparameters are sent
there in one copy (``staging``). A tensor without a gradient is skipped. The drivers that read the table are generated
(``triton_source``).

Each chunk writes its sums to its own slots, and a second launch adds the slots of each tensor in their order, so
results are the same in every run.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from compiled_optim.backends.base import BoundArguments, Call, Shape, Unit
from compiled_optim.backends.staging import Staging, bytes_of
from compiled_optim.backends.table import all_passes, cut
from compiled_optim.backends.table_passes import UPDATE, measure_name
from compiled_optim.program import TensorLists

CHUNK = 1 << 13
"""The number of elements in a chunk: enough to amortise the reads of the table, few enough for all multiprocessors."""

SLOTS = 2
"""The slots of a chunk: one for the part that is loaded 16 bytes at a time, one for the rest."""

ADD_UP_BLOCK = 1024
MAX_CLIPS = 2
"""The largest number of clips that the kernel for clipping takes."""

MAX_COLUMNS = (1 << 31) - 1
"""Indices within a chunk have 32 bits, and a row is not cut."""


class TritonTableUnit(Unit):
    """A module with the drivers of a program's passes. ``device`` is where the table is kept."""

    whole_blocks = True

    def __init__(self, module: Any, device: str) -> None:
        self._module = module
        self._device = torch.device(device)
        self.kernels = 2 * len(module.STAGES) + module.UPDATES

    def bind(self, shapes: Sequence[Shape], lists: TensorLists, arguments: BoundArguments, chunk: int = CHUNK) -> Call:
        """Write the table. The call takes the gradients, None for a tensor that is skipped.

        It returns the sums over each tensor if there is no last pass, else None. ``chunk`` is the number of
        elements in a chunk.
        """
        if any(max(shape[1:2], default=0) > MAX_COLUMNS for shape in shapes):
            raise ValueError(f"a row of a parameter has more than {MAX_COLUMNS} elements; pass compile=False")
        return BoundTritonTable(self._module, self._device, shapes, lists, arguments, chunk)


class BoundTritonTable:
    """A table of tensors on the device, and the launches of a call."""

    def __init__(
        self,
        module: Any,
        device: torch.device,
        shapes: Sequence[Shape],
        lists: TensorLists,
        arguments: BoundArguments,
        chunk: int,
    ) -> None:
        self._lists = lists  # kept alive, because the table holds addresses only
        self._device = device
        self._rows, inv_scale, grad_scale, self._known_totals, *_, found_inf = arguments
        self._known, self._updates, sums = module.KNOWN, module.UPDATES, sum(module.STAGES)
        count = len(shapes)
        self._scalars_at = 2 * 8 * count
        self._row_bytes = 0 if self._rows is None else self._rows.tensor[0].nbytes
        self._scalars = None if self._rows is None else bytes_of(self._rows.tensor)
        self._staging = Staging(self._scalars_at + max(count * self._row_bytes, 8), device)
        own = cut(shapes, chunk, all_passes(len(module.STAGES), module.UPDATES))
        tasks = list(chain.from_iterable(own))
        rows = [shape[0] + len(shape[2:]) for shape in shapes]
        sum_dtype = getattr(torch, module.SUM_DTYPE)
        sizes = {"rows": sum(rows), "tasks": len(tasks)}
        self._totals = torch.zeros(count, self._known + sums, dtype=sum_dtype, device=device)
        addresses = [[tensor.data_ptr() for tensor in tensors] for tensors in lists]
        memory = {
            "tasks": self._send(value for task in tasks for value in task[:4]),  # without slot and passes
            "fixed": self._send(chain.from_iterable(zip(*addresses, strict=True))),
            "columns": self._send(shape[1] if len(shape) > 1 else 1 for shape in shapes),
            "first_rows": self._send(accumulate(rows[:-1], initial=0)),
            "slots": self._send(SLOTS * slot for slot in accumulate(map(len, own), initial=0)),
            "grads": self._staging.memory[: 8 * count].view(torch.int64),
            "row_of": self._staging.memory[8 * count : self._scalars_at].view(torch.int64),
            "scalars": self._staging.memory[self._scalars_at :].view(
                torch.float32 if self._rows is None else self._rows.tensor.dtype
            ),
            "inv_scale": inv_scale,
            "grad_scale": grad_scale,
            "found_inf": found_inf,
            # slots that no kernel writes to stay 0
            "partials": torch.zeros(SLOTS * len(tasks) * sums, dtype=sum_dtype, device=device),
            "totals": self._totals,
            **{f"carry{i}": torch.empty(sum(rows), dtype=sum_dtype, device=device) for i in range(module.CARRIES)},
            **{
                name: torch.empty(sizes[of] * values, dtype=getattr(torch, dtype), device=device)
                for name, dtype, values, of in module.SCRATCH
            },
        }
        self._launches = _launches(module, memory, count, len(tasks))

    def __call__(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """Run the unit on all tensors that have a gradient."""
        with _on(self._device):
            self._send_step(grads)
            if self._known:
                assert self._known_totals is not None
                self._totals[:, : self._known] = self._known_totals.T
            for launch, arguments, options in self._launches:
                launch(*arguments, **options)
        return None if self._updates else self._totals[:, self._known :].T

    def _send_step(self, grads: Sequence[Tensor | None]) -> None:
        """Send the addresses of the gradients, and the rows of the hyperparameters, to the device."""
        buffer = self._staging.take()
        memory, middle, end = buffer.memory, self._scalars_at // 2, self._scalars_at
        addresses = array("q", [0 if grad is None else grad.data_ptr() for grad in grads])
        memory[:middle] = memoryview(addresses).cast("B")
        if self._rows is not None and self._scalars is not None:
            memory[middle:end] = memoryview(self._rows.row_of).cast("B")
            used = (len(self._rows.values) or len(grads)) * self._row_bytes
            memory[end : end + used] = self._scalars[:used]
            end += used
        self._staging.send(buffer, end)

    def _send(self, numbers: Any) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64, device="cpu").to(self._device)


def _launches(module: Any, memory: dict[str, Any], tensors: int, tasks: int) -> list[tuple[Any, list[Any], Any]]:
    """Return the launches of a call: kernels with their grids, arguments and options."""
    from compiled_optim.backends.triton_driver import add_up

    found: list[tuple[Any, list[Any], Any]] = []
    stages = range(len(module.STAGES))
    for stage, name in enumerate([*map(measure_name, stages), *([UPDATE] if module.UPDATES else [])]):
        driver = getattr(module, name)
        arguments = [memory[argument] for argument in driver.arg_names]
        if tasks:
            found.append((driver[(tasks,)], arguments, {"num_warps": module.WARPS, "num_stages": 1}))
        if stage in stages:
            summed = [memory[argument] for argument in ("grads", "slots", "partials", "totals")]
            of_stage = {"FIRST": sum(module.STAGES[:stage]), "COUNT": module.STAGES[stage]}
            sizes = {"SUMS": sum(module.STAGES), "KNOWN": module.KNOWN, "BLOCK": ADD_UP_BLOCK}
            found.append((add_up[(tensors,)], summed, {**of_stage, **sizes}))
    return found


def launch_clip(
    squares: Tensor,
    limits: Sequence[tuple[float, float]],
    maximize: bool,
    inv_scale: Tensor | None,
    grad_scale: Tensor,
) -> Tensor:
    """Launch the kernel that computes the norm and the factor that clips by it; see :meth:`Backend.clip`."""
    from compiled_optim.backends.triton_driver import clip

    norm = torch.empty((), dtype=grad_scale.dtype, device=grad_scale.device)
    numbers = [number for limit in (*limits, limits[0])[:MAX_CLIPS] for number in limit]
    with _on(grad_scale.device):
        clip[(1,)](
            *(squares, norm if inv_scale is None else inv_scale, grad_scale, norm),
            *(len(squares), len(grad_scale), *numbers, -1.0 if maximize else 1.0),
            UNSCALES=inv_scale is not None,
            CLIPS=len(limits),
            BLOCK=ADD_UP_BLOCK,
        )
    return norm


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which ``device`` is the current one. The interpreter runs kernels on the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
