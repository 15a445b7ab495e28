"""Compile a program into a table unit: trace it, lower it with Inductor, and build its kernels with the driver."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from compiled_optim.backends import disk_cache, libraries
from compiled_optim.backends.base import Signature
from compiled_optim.backends.inductor import NO_ASSERTS, TABLE_OPTIONS
from compiled_optim.backends.recording import CPP, CannotRecord
from compiled_optim.backends.table import Cuts, TableForm, TableUnit
from compiled_optim.backends.table_passes import UPDATE, compile_passes, cut_matrices
from compiled_optim.backends.table_source import list_starts, write_source
from compiled_optim.backends.table_verification import table_agrees
from compiled_optim.backends.tracing import compiled_sizes

OPTIONS: dict[str, Any] = {
    **NO_ASSERTS,
    **TABLE_OPTIONS,
    "cpp.threads": 1,  # the driver starts the threads
}
HINT = 1 << 14
"""The number of elements in a chunk that Inductor should optimise for."""


def load_table(signature: Signature) -> TableUnit | None:
    """Return the unit of a signature from disk, or None if it has to be compiled."""
    found = disk_cache.load(signature, OPTIONS)
    if found is None:
        return None
    library, about = found
    try:
        unit = _unit(libraries.load(library), about)
    except (ImportError, KeyError, TypeError, ValueError):
        return None
    unit.from_disk = True
    return unit if table_agrees(signature, unit) else None


def compile_table(signature: Signature) -> TableUnit:
    """Compile the unit of a signature, and save it on disk; raise CannotRecord if its code does not fit the driver."""
    made = compile_passes(signature, CPP, {**OPTIONS, **libraries.cache_options()}, HINT)
    scalars = sum(math.prod(spec.shape) for spec in signature.arguments if spec.name == "scalars")
    dtype = next((spec.dtype for spec in signature.arguments if spec.name == "scalars"), torch.float32)
    source = write_source(made, list_starts(cut_matrices(signature)), scalars, dtype, signature.program.has_blocks)
    library, module = libraries.build_and_load(source)
    cuts = Cuts.ELEMENTS
    if signature.rank > 2:
        cuts = Cuts.MATRICES if compiled_sizes(signature) else Cuts.ROWS
    means = [by_columns for _, by_columns in made.means]
    updates = UPDATE in made.recordings
    form = TableForm(made.sums, made.known, made.carries, made.column_carries, updates, means, cuts)
    about = {**asdict(form), "kernels": made.kernels}
    unit = _unit(module, about)
    if not table_agrees(signature, unit):
        raise CannotRecord("its results differ from those of the eager program")
    if libraries.has_vectors():
        disk_cache.save(signature, OPTIONS, library, about)
    return unit


def _unit(module: Any, about: Mapping[str, Any]) -> TableUnit:
    form = {name: value for name, value in about.items() if name != "kernels"}
    unit = TableUnit(module, TableForm(**{**form, "cuts": Cuts(about["cuts"])}))
    unit.kernels = about["kernels"]
    return unit
