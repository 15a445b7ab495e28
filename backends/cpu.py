"""The CPU backend: lanes over 1-D views, compiled by Inductor to C++ loops that take any length.

A *lane* is the place of one tensor in a call. A unit is compiled for a fixed number of lanes of any length, so it
serves every model. A call with fewer tensors than lanes fills the other lanes with empty tensors. There are two kinds
of units: parallel ones for large tensors, where the threads share each loop, and serial ones for small tensors, where
starting the threads would cost more than the loop.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from compiled_optim.backends import disk_cache
from compiled_optim.backends.base import Availability, BoundArguments, Call, Lane, Shape, Signature, Unit
from compiled_optim.backends.graph import Graph
from compiled_optim.backends.inductor import COMPILER_REMEDY, compile_any_size, settings
from compiled_optim.backends.lanes import LaneBackend
from compiled_optim.program import TensorLists

PARALLEL = Lane("parallel", 1)  # one tensor: a second pass over it finds data in the CPU cache
SERIAL = Lane("serial", 4)

LARGE = 1 << 15
"""The number of elements from which two threads, including their start, are faster than one."""

COMMON_OPTIONS: dict[str, Any] = {
    # the engine guarantees that the tensors of a lane have equal sizes
    "size_asserts": False,
    "alignment_asserts": False,
    "do_not_emit_runtime_assertions": True,
}
# let a later pass recompute values instead of storing a temporary: it reads about as many bytes, and a large temporary
# costs a page fault for every 4 KB in every step
NO_TEMPORARIES = dict.fromkeys(
    ("realize_reads_threshold", "realize_acc_reads_threshold", "realize_opcount_threshold"), 1000
)
OPTIONS: dict[str, dict[str, Any]] = {
    # dynamic_threads: follow torch.set_num_threads at run time instead of compiling the number in
    PARALLEL.kind: {"cpp.dynamic_threads": True, **COMMON_OPTIONS, **NO_TEMPORARIES},
    SERIAL.kind: {"cpp.threads": 1, **COMMON_OPTIONS},
}


def early_stores() -> dict[str, Any]:
    """Return the setting that adds the pass ``EarlyStores``. Call it only to compile, because it imports Inductor."""
    from compiled_optim.backends.early_stores import EarlyStores

    return {"post_grad_custom_post_pass": EarlyStores()}


PASSES: dict[str, Callable[[], dict[str, Any]]] = {PARALLEL.kind: early_stores, SERIAL.kind: dict}
HINTS = {PARALLEL.kind: 1 << 20, SERIAL.kind: 1 << 12}


def compiler() -> str:
    """Return the name of the C++ compiler that Inductor will call."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


class LaneUnit(Unit):
    """A compiled graph over a fixed number of lanes."""

    def __init__(self, graph: Graph, signature: Signature) -> None:
        self._graph = graph
        self._signature = signature
        self.kernels = graph.kernels
        self.seconds = graph.seconds
        self.from_disk = graph.from_disk

    def bind(self, shapes: Sequence[Shape], lists: TensorLists, arguments: BoundArguments) -> Call:
        """Put the graph's inputs into order once; a call only inserts the gradients."""
        width, nothing = self._signature.lane.width, (0,) * self._signature.rank
        lanes = [
            [*tensors, *[torch.empty(nothing, dtype=dtype, device="cpu")] * (width - len(tensors))]
            for tensors, dtype in zip([[], *lists], self._signature.dtypes, strict=True)
        ]
        all_shapes = [*shapes, *[nothing] * (width - len(shapes))]
        return self._graph.bind(self._graph.order_inputs(all_shapes, lanes, arguments.tensors()), len(shapes))


class CpuBackend(LaneBackend):
    """Inductor's C++ code. The units depend on the signature only, not on the model."""

    name = "cpu"
    devices = ("cpu",)
    grads_by_address = True
    seconds_per_unit = 2.5

    def cache_directory(self) -> Path | None:
        """Return Inductor's cache directory."""
        return disk_cache.directory()

    def is_cached(self, signature: Signature) -> bool:
        """Return True if the disk cache has a record for this signature and these settings."""
        kind = signature.lane.kind
        return disk_cache.contains(signature, settings(HINTS[kind], OPTIONS[kind]))

    def available(self) -> Availability:
        """Report whether the C++ compiler that Inductor will call exists."""
        if shutil.which(compiler()) is None:
            return Availability(False, f"no C++ compiler was found (looked for {compiler()!r}); {COMPILER_REMEDY}")
        return Availability(True)

    def cut(self, shapes: Sequence[Shape]) -> list[tuple[Lane, list[int]]]:
        """Split into calls for large tensors and calls for small ones; empty tensors need no call."""
        sizes = list(map(math.prod, shapes))
        large = [i for i, size in enumerate(sizes) if size >= LARGE]
        small = [i for i, size in enumerate(sizes) if 0 < size < LARGE]
        return [
            (lane, indices[start : start + lane.width])
            for lane, indices in ((PARALLEL, large), (SERIAL, small))
            for start in range(0, len(indices), lane.width)
        ]

    def compile(self, signature: Signature) -> Unit:
        """Compile the program over this signature's lanes."""
        kind = signature.lane.kind
        return LaneUnit(compile_any_size(signature, HINTS[kind], OPTIONS[kind], PASSES[kind]), signature)
