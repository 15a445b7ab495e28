"""What the accelerator backends share: whole lists, of compiled-in shapes, in one call.

A launch costs the host more than a small tensor costs an accelerator, so a call takes as many tensors as one graph can
hold. Shapes are compiled in. Measured on Inductor's CUDA code (20 tensors, AdamW): with sizes left open, compiling
takes 1.8 times as long and no load is wider than 4 bytes (16 where the size is known to be a multiple), and a sum is
split over the blocks that suit one assumed size. The price is that another model compiles again. Lists are sorted by
shape, so where a model repeats its layers, runs of equal tensors share a unit.

Scalars are 0-dim CPU tensors, whose values become arguments of the kernels; the host does not wait for the device.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.backends.base import BoundArguments, Call, Lane, Shape, Signature, Unit
from compiled_optim.backends.graph import ArgumentValues, Graph
from compiled_optim.backends.inductor import Lowered, agrees, disagreement
from compiled_optim.backends.lanes import LaneBackend
from compiled_optim.backends.tracing import trace
from compiled_optim.program import TensorLists

REMEDY = "pass compile=False to run the same step eagerly on this device"
"""What to do where an accelerator's compiler is missing."""

MAX_VERIFIED_ELEMENTS = 1 << 22
"""A unit is run against the eager program before use only if it takes no more elements than this, to spare memory."""


class ListUnit(Unit):
    """A compiled graph over lists of fixed shapes."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.kernels = graph.kernels
        self.seconds = graph.seconds

    def bind(self, shapes: Sequence[Shape], lists: TensorLists, arguments: BoundArguments) -> Call:
        """Order the graph's inputs once; a call only puts the gradients into their places."""
        nothing: list[Any] = [None] * len(shapes)
        inputs = self._graph.order_inputs((), [nothing, *lists], unbind_scalars(arguments.tensors()))
        return self._graph.bind(inputs, len(shapes))


class WholeListBackend(LaneBackend):
    """Cuts lists only where they get too long, and compiles each part for its shapes."""

    limit: int
    """How many tensors a call takes at most."""

    unit_type: type[ListUnit] = ListUnit

    @abstractmethod
    def lower(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Lowered:
        """Compile a traced graph."""

    def cut(self, shapes: Sequence[Shape]) -> list[tuple[Lane, list[int]]]:
        """Cut into parts of at most ``limit`` tensors, sorted by shape."""
        indices = sorted((i for i, shape in enumerate(shapes) if math.prod(shape)), key=lambda i: shapes[i])
        parts = [indices[start : start + self.limit] for start in range(0, len(indices), self.limit)]
        return [(Lane("list", len(part), tuple(tuple(shapes[i]) for i in part)), part) for part in parts]

    def compile(self, signature: Signature) -> Unit:
        """Trace on fake tensors and compile; a graph that does not compute what the program does is not used."""
        start = time.perf_counter()
        with torch.inference_mode(False), torch.no_grad():
            graph = self.graph(signature)
            shapes = signature.lane.shapes
            if sum(map(math.prod, shapes)) <= MAX_VERIFIED_ELEMENTS and not agrees(
                signature,
                shapes,
                lambda lists, arguments: graph.run(graph.order_inputs((), lists, unbind_scalars(arguments))),
            ):
                raise disagreement(signature)
        graph.seconds = time.perf_counter() - start
        return self.unit_type(graph)

    def graph(self, signature: Signature) -> Graph:
        """Return the compiled graph of a signature, not yet run."""
        traced = trace(signature, signature.lane.shapes, unbind_scalars=True)
        run, kernels = self.lower(traced.module, traced.examples)
        return Graph(run, traced.inputs, kernels)


def unbind_scalars(arguments: ArgumentValues) -> ArgumentValues:
    """Return the arguments with the scalars as 0-dim views of the same host memory."""
    scalars = arguments.get("scalars")
    return {**arguments, "scalars": scalars.unbind()} if isinstance(scalars, Tensor) else arguments
