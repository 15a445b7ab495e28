"""The base of the backends that run a batch in one call, over a table of pointers.

Inductor compiles the program for one tensor of any length, and a driver runs the generated code over all tensors. A
unit serves every model. If the generated code does not fit the driver, the tensors are updated one by one
(``tensor_by_tensor``), and ``explain()`` says why.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_optim.backends import disk_cache
from compiled_optim.backends.base import (
    Backend,
    Batch,
    BoundArguments,
    BoundBatch,
    BoundCall,
    Lane,
    Shape,
    Signature,
    Unit,
    UnitCall,
)
from compiled_optim.backends.recording import CannotRecord
from compiled_optim.backends.table import BoundTable, in_blocks
from compiled_optim.backends.table_passes import unit_stages
from compiled_optim.backends.tensor_by_tensor import compile_tensor_by_tensor
from compiled_optim.program import Result, TensorLists

TABLE = Lane("table", 1)

MATRIX_RANK = 3
"""The number of dimensions of a stack of matrices."""

SMALL_MATRIX, MANY_SMALL_MATRIX = 16, 64
"""The largest number of elements of a matrix whose size is compiled in, also if it is one of MANY in a stack."""

MANY = 1 << 10
"""The number of matrices from which a task for each takes longer than what it computes."""


class TableBackend(Backend):
    """Makes one call for all tensors of a batch. The units depend on the signature only, not on the model."""

    takes_rows = True
    by_address = True
    refused_storages: tuple[str, ...] = ()

    @abstractmethod
    def settings(self, signature: Signature) -> Mapping[str, Any]:
        """Return what the generated code of a unit depends on in addition to its signature."""

    @abstractmethod
    def load_table(self, signature: Signature) -> Unit | None:
        """Return the unit of a signature from disk, or None if it has to be compiled."""

    @abstractmethod
    def compile_table(self, signature: Signature) -> Unit:
        """Compile the unit of a signature; raise CannotRecord if its code does not fit the driver."""

    def run_compiler(self, compile: Callable[[], Unit]) -> Unit:
        """Return the result of ``compile()``. A backend may turn errors of its compiler into errors with a remedy."""
        return compile()

    def cache_directory(self) -> Path | None:
        """Return Inductor's cache directory."""
        return disk_cache.directory()

    def is_cached(self, signature: Signature) -> bool:
        """Return True if the disk cache has a record for this signature and these settings."""
        return disk_cache.contains(signature, self.settings(signature))

    def units(self, batch: Batch) -> list[UnitCall]:
        """Return one call for all tensors, or several for matrices: one for each size of small ones."""
        rank = 2 if batch.program.has_blocks else len(batch.shapes[0])
        arguments = tuple(
            # a unit takes the totals of one tensor
            spec._replace(shape=spec.shape[:1]) if spec.name == "totals" else spec
            for spec in batch.arguments
        )
        return [
            UnitCall(Signature(batch.program, batch.device, rank, batch.dtypes, arguments, lane), indices)
            for lane, indices in _cut(batch).items()
        ]

    def bind(self, batch: Batch, lists: TensorLists, arguments: BoundArguments) -> BoundBatch:
        """Bind the unit of each call to all tensors. If there are several, each gets only the gradients of its own."""
        calls = []
        for signature, indices in batch.calls:
            unit = self.get_unit(signature)
            shapes, pick = batch.shapes, _all
            if batch.program.has_blocks:
                shapes = list(map(in_blocks, shapes))
            if len(batch.calls) > 1:
                shapes, pick = _without_others(shapes, indices), partial(_only, frozenset(indices))
            calls.append(BoundCall(unit, signature, pick, unit.bind(shapes, lists, arguments)))
        return BoundBatch(calls) if len(calls) > 1 else _OneCall(calls[0], batch.program.result)

    def compile(self, signature: Signature) -> Unit:
        """Load or compile a table unit. If the generated code does not fit, compile a unit for single tensors."""
        start = time.perf_counter()
        with torch.inference_mode(False), torch.no_grad():
            unit = self.load_table(signature)
            if unit is None:
                unit = self.run_compiler(partial(self._compile, signature))
        unit.seconds = time.perf_counter() - start
        return unit

    def _compile(self, signature: Signature) -> Unit:
        try:
            return self.compile_table(signature)
        except CannotRecord as error:
            if signature.program.row_lists:
                raise NotImplementedError(
                    f"{signature.program.name} cannot keep states in 8 bits: {error}; use state_dtype=torch.bfloat16"
                ) from error
            returned = signature.program.result is not Result.NOTHING
            unit = compile_tensor_by_tensor(signature, sum(unit_stages(signature)) if returned else 0)
            unit.limit = str(error)
            return unit


def _cut(batch: Batch) -> Mapping[Lane, Sequence[int]]:
    """Return the lanes of a batch with their tensors.

    A loop over a row of three elements takes longer than the elements do, so the sizes of small matrices are compiled
    in, and a task is for many of them. Convolutions have them in great number, but in few sizes.
    """
    if len(batch.shapes[0]) != MATRIX_RANK or batch.program.result is not Result.NOTHING:
        return {TABLE: range(len(batch.shapes))}
    lanes: dict[Lane, list[int]] = {}
    for i, shape in enumerate(batch.shapes):
        is_small = 0 < math.prod(shape[1:]) <= (MANY_SMALL_MATRIX if shape[0] >= MANY else SMALL_MATRIX)
        lane = Lane(f"table {shape[1]}×{shape[2]}", 1, ((0, *shape[1:]),)) if is_small else TABLE
        lanes.setdefault(lane, []).append(i)
    return lanes


def _all(grads: Sequence[Any]) -> Sequence[Any]:
    return grads


def _without_others(shapes: Sequence[Shape], indices: Sequence[int]) -> list[Shape]:
    """Return shapes without elements for the tensors of other calls: a table needs no tasks for them."""
    own = frozenset(indices)
    return [shape if i in own else (0,) * len(shape) for i, shape in enumerate(shapes)]


def _only(indices: Collection[int], grads: Sequence[Any]) -> list[Any]:
    return [grad if i in indices else None for i, grad in enumerate(grads)]


class _OneCall(BoundBatch):
    """A batch that one call runs. A sum is returned as one number for each tensor."""

    def __init__(self, call: BoundCall, result: Result) -> None:
        super().__init__([call])
        self._run = call.call
        if isinstance(call.call, BoundTable):
            self.runs = call.call.runs
        else:
            self._run = self._counted
        self._returns_sum = result is Result.SUM

    def __call__(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """Run the program on all tensors that have a gradient."""
        result = self._run(grads)
        return result.view(-1) if self._returns_sum and result is not None else result

    def _counted(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """Run a call that does not count its runs itself."""
        result = self.calls[0].call(grads)
        self.runs[0] += 1
        return result
