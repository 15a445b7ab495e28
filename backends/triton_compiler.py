"""Compile a program into a table unit for GPUs: Inductor's kernels and a driver, in a module that Triton compiles.

The module is kept in Inductor's cache directory. Another process loads it without Inductor, and Triton finds the
machine code in its own cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from compiled_optim.backends import disk_cache
from compiled_optim.backends.base import Signature
from compiled_optim.backends.inductor import NO_ASSERTS, TABLE_OPTIONS
from compiled_optim.backends.recording import TRITON, CannotRecord
from compiled_optim.backends.table_passes import NOT_CUT, compile_passes
from compiled_optim.backends.table_verification import table_agrees
from compiled_optim.backends.tracing import SizeBounds, unit_sum_dtype
from compiled_optim.backends.triton_source import write_source
from compiled_optim.backends.triton_table import CHUNK, TritonTableUnit

OPTIONS: dict[str, Any] = {
    **NO_ASSERTS,
    **TABLE_OPTIONS,
    "assume_aligned_inputs": True,  # the drivers find out what is aligned
    "split_reductions": False,  # a chunk is a part of a sum already
    # a kernel over rows and columns has an index for each, so it need not divide
    "triton.prefer_nd_tiling": True,
    "triton.max_tiles": 2,
    "cpp_wrapper": False,
    "combo_kernels": False,
}
BOUNDS = SizeBounds(1, (1 << 31) - 1)
"""The sizes of a chunk: it is not empty, and 32-bit indices are enough."""


def settings(signature: Signature) -> dict[str, Any]:
    """Return what the generated code depends on in addition to a signature: options, Triton, and the kind of GPU."""
    device = torch.cuda.get_device_properties(signature.device)
    kind = (device.name, device.major, device.minor, device.multi_processor_count)
    return {**OPTIONS, "triton": version("triton"), "device": kind}


def load_triton_table(signature: Signature, memory: str | None = None) -> TritonTableUnit | None:
    """Return the unit of a signature from disk, or None if it has to be compiled.

    ``memory`` is the device of the tensors if it is not that of the signature: Triton's interpreter runs the kernels on
    the CPU.
    """
    found = disk_cache.load(signature, settings(signature))
    if found is None:
        return None
    try:
        unit = _verified(signature, found[0], memory)
    except (ImportError, SyntaxError, AttributeError, CannotRecord):
        return None
    unit.from_disk = True
    return unit


def compile_triton_table(signature: Signature, memory: str | None = None) -> TritonTableUnit:
    """Compile the unit of a signature, and save it on disk; raise CannotRecord if its code does not fit the driver."""
    module = write_module(signature)
    unit = _verified(signature, module, memory)
    disk_cache.save(signature, settings(signature), module, {})
    return unit


def _verified(signature: Signature, module: Path, memory: str | None) -> TritonTableUnit:
    """Return the unit of a module; raise CannotRecord if it does not compute what the eager program does."""
    device = memory or signature.device
    unit = TritonTableUnit(load_module(module), device)
    if not table_agrees(replace(signature, device=device), unit):
        raise CannotRecord("its results differ from those of the eager program")
    return unit


def write_module(signature: Signature) -> Path:
    """Generate the module of a unit, and write it to the cache directory."""
    if signature.rank > 2:
        raise CannotRecord(NOT_CUT)
    made = compile_passes(signature, TRITON, OPTIONS, CHUNK, BOUNDS)
    scalars = sum(math.prod(spec.shape) for spec in signature.arguments if spec.name == "scalars")
    lists = signature.dtypes, signature.program.row_lists, signature.rank
    skips = any(spec.name == "found_inf" for spec in signature.arguments)
    source = write_source(made, *lists, scalars, unit_sum_dtype(signature), skips)
    name = f"triton_{hashlib.sha256(source.encode()).hexdigest()}.py"
    path = disk_cache.directory() / disk_cache.FOLDER / name
    disk_cache.write(path, source)
    return path


def load_module(path: Path) -> Any:
    """Return a generated module. It is not added to ``sys.modules``."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
