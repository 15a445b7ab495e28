"""The base of the NPU backends: one call takes a whole list of tensors, whose shapes are compiled in.

A kernel launch takes longer on the host than a small tensor takes on an accelerator, so a call takes as many tensors as
one graph can hold. Shapes are compiled in because dynamic sizes are slower.

Limit: each model compiles its own units. Lists are sorted by shape, so repeated layers of a model can share a unit.

Scalars are 0-dim CPU tensors. Their values become kernel arguments, so the host does not wait for the device.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compiled_optim.backends.base import BoundArguments, Call, Lane, Shape, Signature, Unit
from compiled_optim.backends.graph import ArgumentValues, Graph
from compiled_optim.backends.inductor import Lowered
from compiled_optim.backends.lanes import LaneBackend
from compiled_optim.backends.tracing import TracedGraph, trace
from compiled_optim.backends.verification import agrees, disagreement
from compiled_optim.program import TensorLists

REMEDY = "pass compile=False to run the same step eagerly on this device"
"""The remedy if an accelerator's compiler is missing."""

MAX_VERIFIED_ELEMENTS = 1 << 22
"""The largest unit, in elements, that is compared with the eager program before use. The comparison takes memory."""


class ListUnit(Unit):
    """A compiled graph over lists of fixed shapes."""

    def __init__(self, graph: Graph, prepare: Callable[[ArgumentValues], ArgumentValues]) -> None:
        self._graph = graph
        self._prepare = prepare
        self.kernels = graph.kernels
        self.seconds = graph.seconds

    def bind(self, shapes: Sequence[Shape], lists: TensorLists, arguments: BoundArguments) -> Call:
        """Put the graph's inputs into order once; a call only inserts the gradients."""
        nothing: list[Any] = [None] * len(shapes)
        inputs = self._graph.order_inputs((), [nothing, *lists], self._prepare(arguments.of_row(0)))
        return self._graph.bind(inputs, len(shapes))


class WholeListBackend(LaneBackend):
    """Splits only lists that are too long, and compiles each part for its shapes."""

    limit: int
    """The largest number of tensors in a call."""

    @abstractmethod
    def lower(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Lowered:
        """Compile a traced graph."""

    def cut(self, shapes: Sequence[Shape]) -> list[tuple[Lane, list[int]]]:
        """Sort the tensors by shape and split them into parts of at most ``limit``."""
        indices = sorted(range(len(shapes)), key=lambda i: shapes[i])
        parts = [indices[start : start + self.limit] for start in range(0, len(indices), self.limit)]
        return [(Lane("list", len(part), tuple(tuple(shapes[i]) for i in part)), part) for part in parts]

    def compile(self, signature: Signature) -> Unit:
        """Trace on fake tensors and compile; raise if the results differ from those of the eager program."""
        start = time.perf_counter()
        with torch.inference_mode(False), torch.no_grad():
            graph, shapes = self.graph(signature), signature.lane.shapes
            prepare = partial(self.graph_arguments, signature)
            if sum(map(math.prod, shapes)) <= MAX_VERIFIED_ELEMENTS and not agrees(
                signature,
                shapes,
                lambda lists, arguments: graph.run(graph.order_inputs((), lists, prepare(arguments))),
            ):
                raise disagreement(signature)
        graph.seconds = time.perf_counter() - start
        return ListUnit(graph, prepare)

    def graph(self, signature: Signature) -> Graph:
        """Return the compiled graph of a signature, before verification."""
        traced = self.trace(signature)
        run, kernels = self.lower(traced.module, traced.examples)
        return Graph(run, traced.inputs, kernels)

    def trace(self, signature: Signature) -> TracedGraph:
        """Trace a signature, with each hyperparameter as a separate input."""
        return trace(signature, signature.lane.shapes, unbind_scalars=True)

    def graph_arguments(self, signature: Signature, arguments: ArgumentValues) -> ArgumentValues:
        """Return the arguments as the graph takes them: the scalars are 0-dim views of the same host memory."""
        scalars = arguments.get("scalars")
        return {**arguments, "scalars": scalars.unbind()} if isinstance(scalars, Tensor) else arguments
