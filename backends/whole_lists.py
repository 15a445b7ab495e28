"""What the accelerator backends have in common: whole lists, of compiled-in shapes, in one call.

A launch costs the host more than a small tensor costs an accelerator, so a call takes as many tensors as one graph can
hold. Shapes are compiled in. Measured on Inductor's CUDA code (20 tensors, AdamW): with sizes left open, compiling
takes 1.8 times as long and no load is wider than 4 bytes (16 where the size is known to be a multiple), and a sum is
split over the blocks that suit one assumed size. The price is that another model compiles anew. Lists are sorted by
shape, so where a model repeats its layers, stretches of equal tensors share a unit.

No tensor is allocated to compile: the program is traced on fake ones. Scalars are 0-dim CPU tensors, whose values
become arguments of the kernels; the host waits for nothing.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.backends.base import Backend, Call, Lane, Signature, Unit
from compiled_optim.backends.graph import Graph
from compiled_optim.backends.inductor import Lowered, agrees, disagreement, trace
from compiled_optim.program import TensorLists

REMEDY = "pass compile=False to run the same step eagerly on this device"
"""The way out where an accelerator's compiler is missing."""

VERIFIED = 1 << 22
"""A unit is run against the eager program before use if a call has at most so many elements: not to fill the memory."""


class ListUnit(Unit):
    """A compiled graph over lists of fixed shapes."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.kernels = graph.kernels
        self.seconds = graph.seconds

    def bind(self, shapes: Sequence[tuple[int, ...]], lists: TensorLists, shared: Sequence[Tensor]) -> Call:
        """Lay out the graph's arguments once; a call only puts the gradients into their places."""
        nothing: list[Any] = [None] * len(shapes)
        return self._graph.bind(self._graph.arguments((), [nothing, *lists], apart(shared)), len(shapes))


class WholeListBackend(Backend):
    """Cuts lists only where they get too long, and compiles each stretch for its shapes."""

    limit: int
    """How many tensors a call takes at most."""

    unit_type: type[ListUnit] = ListUnit

    @abstractmethod
    def lower(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Lowered:
        """Compile a traced graph."""

    def cut(self, shapes: Sequence[tuple[int, ...]]) -> list[tuple[Lane, list[int]]]:
        """Cut into stretches of at most ``limit`` tensors, sorted by shape."""
        places = sorted((i for i, shape in enumerate(shapes) if math.prod(shape)), key=lambda i: shapes[i])
        stretches = [places[start : start + self.limit] for start in range(0, len(places), self.limit)]
        return [(Lane("list", len(s), tuple(tuple(shapes[i]) for i in s)), s) for s in stretches]

    def compile(self, signature: Signature) -> Unit:
        """Trace on fake tensors and compile; a graph that does not compute what the program does is not used."""
        start = time.perf_counter()
        with torch.inference_mode(False), torch.no_grad():
            graph = self.graph(signature)
            shapes = signature.lane.shapes
            if sum(map(math.prod, shapes)) <= VERIFIED and not agrees(
                signature, shapes, lambda lists, shared: graph.run(graph.arguments((), lists, apart(shared)))
            ):
                raise disagreement(signature)
        graph.seconds = time.perf_counter() - start
        return self.unit_type(graph)

    def graph(self, signature: Signature) -> Graph:
        """The compiled graph of a signature, not yet run."""
        from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

        def lower(module: torch.fx.GraphModule, inputs: list[Any]) -> Lowered:
            with unset_fake_temporarily():  # a compiler may make real constants
                return self.lower(module, inputs)

        with FakeTensorMode():
            lists = [
                [torch.empty(shape, dtype=dtype, device=signature.device) for shape in signature.lane.shapes]
                for dtype in signature.dtypes
            ]
            scalars, *others = signature.shared or [(torch.float32, (0,))]
            shared = [torch.empty((), dtype=scalars[0], device="cpu") for _ in range(scalars[1][0])]
            shared += [torch.empty(shape, dtype=dtype, device=signature.device) for dtype, shape in others]
            return trace(signature, lists, shared, lower)


def apart(shared: Sequence[Tensor]) -> list[Tensor]:
    """The shared tensors with the scalars, the first of them, as 0-dim views of the same host memory."""
    return [*shared[0].unbind(), *shared[1:]] if shared else []
