"""The CPU backend: one native call for all tensors of a batch, over a table of pointers (``table_compiler``)."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from compiled_optim.backends import disk_cache
from compiled_optim.backends.base import Availability, Signature, Unit
from compiled_optim.backends.faults import COMPILER_REMEDY, compile_safely
from compiled_optim.backends.table_backend import TableBackend
from compiled_optim.backends.table_compiler import OPTIONS, compile_table, load_table


def compiler() -> str:
    """Return the name of the C++ compiler that Inductor will call."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


@lru_cache
def _is_on_path(program: str, path: str) -> bool:
    return shutil.which(program, path=path) is not None


class CpuBackend(TableBackend):
    """Inductor's C++ code, run by a C++ driver with several threads."""

    name = "cpu"
    devices = ("cpu",)
    seconds_per_unit = 1.5

    def available(self) -> Availability:
        """Report whether there is a C++ compiler, or units on disk from an earlier run with one."""
        if _is_on_path(compiler(), os.environ.get("PATH", os.defpath)) or disk_cache.count_records():
            return Availability(True)
        return Availability(False, f"no C++ compiler was found (looked for {compiler()!r}); {COMPILER_REMEDY}")

    def settings(self, signature: Signature) -> Mapping[str, Any]:
        """Return the settings of Inductor."""
        return OPTIONS

    def load_table(self, signature: Signature) -> Unit | None:
        """Return the unit of a signature from disk, or None if it has to be compiled."""
        return load_table(signature)

    def run_compiler(self, compile: Callable[[], Unit]) -> Unit:
        """Repair damaged files of the cache, and explain errors of the C++ compiler and of the disk."""
        return compile_safely(compile)

    def compile_table(self, signature: Signature) -> Unit:
        """Compile the unit of a signature; raise CannotRecord if its code does not fit the driver."""
        return compile_table(signature)
