"""Units whose generated code does not fit the table driver: one call of Inductor's function for each tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compiled_optim.backends import libraries
from compiled_optim.backends.base import BoundArguments, Call, Shape, Signature, Unit
from compiled_optim.backends.graph import Graph
from compiled_optim.backends.inductor import NO_ASSERTS, lower
from compiled_optim.backends.tracing import compiled_sizes, trace, unit_sum_dtype
from compiled_optim.backends.verification import ExampleArguments, agrees, disagreement
from compiled_optim.program import Program, TensorLists

# on the CPU, follow torch.set_num_threads instead of compiling the number in
OPTIONS: dict[str, Any] = {**NO_ASSERTS, "cpp.dynamic_threads": True}
HINT = 1 << 20


class TensorByTensorUnit(Unit):
    """A compiled graph over one tensor of any size.

    ``sums`` is the number of sums it returns, ``dtype`` their dtype, and ``device`` where its inputs are.
    """

    def __init__(self, program: Program, graph: Graph, sums: int, dtype: torch.dtype, device: str) -> None:
        self._program = program
        self._graph = graph
        self._sums, self._dtype, self._device = sums, dtype, device
        self.kernels = graph.kernels

    def bind(self, shapes: Sequence[Shape], lists: TensorLists, arguments: BoundArguments) -> Call:
        """Return a call that runs the graph on each tensor that has a gradient, and elements unless it needs none."""
        list_shape, runs_on_empty = self._program.list_shape, self._program.runs_on_empty
        views = [
            [_view(tensor, list_shape(i, shape)) for tensor, shape in zip(tensors, shapes, strict=True)]
            for i, tensors in enumerate(lists, 1)
        ]
        totals, rows = arguments.totals, arguments.scalars
        results = None
        if self._sums:
            results = torch.zeros(len(shapes), self._sums, dtype=self._dtype, device=self._device)

        def call(grads: Sequence[Tensor | None]) -> Tensor | None:
            if results is not None:
                results.zero_()
            for i, (grad, shape) in enumerate(zip(grads, shapes, strict=True)):
                if grad is None or not (grad.numel() or runs_on_empty):
                    continue
                own = _moved(arguments.of_row(0 if rows is None else rows.row_of[i]), self._device)
                if totals is not None:  # of the stages before
                    own["totals"] = totals[:, i].contiguous()
                given = [[_view(grad, shape)], *([tensors[i]] for tensors in views)]
                outputs = self._graph(self._graph.order_inputs([shape], given, own))
                if outputs and results is not None:
                    results[i] = outputs[0]
            return None if results is None else results.T

        return call


def _view(tensor: Tensor, shape: Shape) -> Tensor:
    """Return a real view of the memory of a dense tensor."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.as_strided(shape, _strides(shape))


def _strides(shape: Shape) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def compile_tensor_by_tensor(signature: Signature, sums: int) -> Unit:
    """Compile the program over one tensor of any size; raise if it computes something else than the eager program.

    ``sums`` is the number of sums that the program returns.
    """
    traced = trace(signature, hint=HINT, decompose_foreach=signature.program.reduces)
    run, kernels = lower(traced.module, traced.examples, {**OPTIONS, **libraries.cache_options()})
    graph = Graph(run, traced.inputs, kernels)
    for size in (37, 1):
        shape = (size, *(compiled_sizes(signature) or (5, 3)[: signature.rank - 1]))
        if not agrees(signature, [shape], partial(_run_on, graph, shape, signature.device)):
            raise disagreement(signature)
    return TensorByTensorUnit(signature.program, graph, sums, unit_sum_dtype(signature), signature.device)


def _run_on(
    graph: Graph, shape: Shape, device: str, lists: TensorLists, arguments: ExampleArguments
) -> Sequence[Tensor]:
    return graph(graph.order_inputs([shape], lists, _moved(arguments, device)))


def _moved(arguments: Mapping[str, Tensor], device: str) -> dict[str, Tensor]:
    """Return arguments on the device of a graph."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in arguments.items()}
