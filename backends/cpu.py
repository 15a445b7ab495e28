"""The CPU backend: one native call for all tensors of a batch, over a table of pointers.

Inductor compiles the program for one tensor of any length, and a driver runs the generated code over all tensors
(``table``). A unit serves every model. If the generated code does not fit the driver, the tensors are updated one by
one (``tensor_by_tensor``), and ``explain()`` says why.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from compiled_optim.backends import disk_cache
from compiled_optim.backends.base import (
    Availability,
    Backend,
    Batch,
    BoundArguments,
    BoundBatch,
    BoundCall,
    Lane,
    Signature,
    Unit,
    UnitCall,
)
from compiled_optim.backends.faults import COMPILER_REMEDY, compile_safely
from compiled_optim.backends.recording import CannotRecord
from compiled_optim.backends.table import BoundTable
from compiled_optim.backends.table_compiler import OPTIONS, compile_table, count_unit_sums, load_table
from compiled_optim.backends.tensor_by_tensor import compile_tensor_by_tensor
from compiled_optim.program import Result, TensorLists

TABLE = Lane("table", 1)


def compiler() -> str:
    """Return the name of the C++ compiler that Inductor will call."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


@lru_cache
def _is_on_path(program: str, path: str) -> bool:
    return shutil.which(program, path=path) is not None


class CpuBackend(Backend):
    """Inductor's C++ code. The units depend on the signature only, not on the model."""

    name = "cpu"
    devices = ("cpu",)
    takes_rows = True
    by_address = True
    seconds_per_unit = 1.5

    def cache_directory(self) -> Path | None:
        """Return Inductor's cache directory."""
        return disk_cache.directory()

    def is_cached(self, signature: Signature) -> bool:
        """Return True if the disk cache has a record for this signature and these settings."""
        return disk_cache.contains(signature, OPTIONS)

    def available(self) -> Availability:
        """Report whether there is a C++ compiler, or units on disk from an earlier run with one."""
        if _is_on_path(compiler(), os.environ.get("PATH", os.defpath)) or disk_cache.count_records():
            return Availability(True)
        return Availability(False, f"no C++ compiler was found (looked for {compiler()!r}); {COMPILER_REMEDY}")

    def units(self, batch: Batch) -> list[UnitCall]:
        """Return one call for all tensors."""
        rank = len(batch.shapes[0])
        arguments = tuple(
            # a unit takes the totals of one tensor
            spec._replace(shape=spec.shape[:1]) if spec.name == "totals" else spec
            for spec in batch.arguments
        )
        signature = Signature(batch.program, batch.device, rank, batch.dtypes, arguments, TABLE)
        return [UnitCall(signature, range(len(batch.shapes)))]

    def bind(self, batch: Batch, lists: TensorLists, arguments: BoundArguments) -> BoundBatch:
        """Bind the unit to all tensors."""
        ((signature, _),) = batch.calls
        unit = self.get_unit(signature)
        call = unit.bind(batch.shapes, lists, arguments)
        return _OneCall(BoundCall(unit, signature, lambda grads: grads, call), batch.program.result)

    def compile(self, signature: Signature) -> Unit:
        """Load or compile a table unit. If the generated code does not fit, compile a unit for single tensors."""
        start = time.perf_counter()
        with torch.inference_mode(False), torch.no_grad():
            unit: Unit | None = load_table(signature)
            if unit is None:
                unit = compile_safely(partial(_compile, signature))
        unit.seconds = time.perf_counter() - start
        return unit


def _compile(signature: Signature) -> Unit:
    try:
        return compile_table(signature)
    except CannotRecord as error:
        returned = signature.program.result is not Result.NOTHING
        unit = compile_tensor_by_tensor(signature, count_unit_sums(signature) if returned else 0)
        unit.limit = str(error)
        return unit


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
