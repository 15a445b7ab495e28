"""Compile a traced program with Inductor and call the compiled graph directly.

``torch.compile`` would add Dynamo's frame evaluation, its guards and AOTAutograd's wrappers to every call: 41 µs for 4
tensors, where the graph itself takes 2.3 µs. They are not needed here: a graph assumes exactly its :class:`Signature`,
and a unit is only called with inputs of its signature.

Limit: this relies on Inductor's ``CompiledFxGraph``, which is private. Therefore each graph, compiled or from disk, is
run once and compared with the eager program, and is not used if the results differ.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from subprocess import CalledProcessError
from typing import Any

import torch
from torch import Tensor

from compiled_optim.backends import disk_cache
from compiled_optim.backends.base import Shape, Signature
from compiled_optim.backends.graph import Graph
from compiled_optim.backends.kernel_call import only_kernel
from compiled_optim.backends.tracing import TracedGraph, trace
from compiled_optim.errors import BackendUnavailableError
from compiled_optim.program import Arguments, TensorLists

Run = Callable[[list[Any]], Sequence[Tensor]]
Lowered = tuple[Run, int]
"""The function that runs a compiled graph, and the number of its kernels."""

ExampleArguments = Mapping[str, Tensor]

WRONG_INPUTS = (IndexError, KeyError, RuntimeError, TypeError)
"""What a graph raises on inputs it was not made for."""


def compile_any_size(
    signature: Signature, hint: int, options: Mapping[str, Any], passes: Callable[[], Mapping[str, Any]] = dict
) -> Graph:
    """Return the graph of a signature's program for tensors of any size; load it from disk, or compile it.

    Args:
        signature: what to compile; its lane's width is the length of the lists.
        hint: the number of elements Inductor should optimise for.
        options: Inductor settings for this compilation only.
        passes: returns further settings. They are code of this package, which the key on disk covers already.
    """
    start = time.perf_counter()
    key = settings(hint, options)
    with torch.inference_mode(False), torch.no_grad():
        known = disk_cache.load(signature, key)
        graph = _verified(signature, Graph(*known, from_disk=True)) if known is not None else None
        if graph is None:
            # Inductor does not fuse foreach operations into a reduction that follows them
            traced = trace(signature, hint=hint, decompose_foreach=signature.program.reduces)
            compiled = Graph(*_lower(traced, {**options, **passes()}))
            graph = _verified(signature, compiled)
            if graph is None:
                raise disagreement(signature)
            disk_cache.save(signature, key, compiled.run, compiled.inputs, compiled.kernels)
    graph.seconds = time.perf_counter() - start
    return graph


def settings(hint: int, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a graph depends on in addition to its signature; both are part of its key on disk."""
    return {**options, "hint": hint}


def lower(module: torch.fx.GraphModule, examples: list[Any], options: Mapping[str, Any]) -> Lowered:
    """Compile a traced graph with Inductor; the options apply to this compilation only."""
    from torch._inductor import metrics
    from torch._inductor.compile_fx import compile_fx

    kernels = metrics.generated_kernel_count
    compiled: Any = compile_fx(module, examples, config_patches=dict(options))
    return _innermost(compiled), metrics.generated_kernel_count - kernels


def _lower(traced: TracedGraph, options: Mapping[str, Any]) -> tuple[Run, list[Any], int]:
    """Compile a traced graph for the CPU; raise BackendUnavailableError if the C++ compiler or the disk fails."""
    from torch._inductor import exc

    try:
        run, kernels = lower(traced.module, traced.examples, options)
    except exc.InductorError as error:
        cause = error.inner_exception
        if isinstance(cause, exc.InvalidCxxCompiler | exc.CppCompileError | CalledProcessError):
            raise BackendUnavailableError(f"the C++ compiler does not work: {cause}\n{COMPILER_REMEDY}") from None
        if isinstance(cause, OSError):
            raise disk_cache.unusable(cause) from error
        raise
    return run, traced.inputs, kernels


def _examples(signature: Signature, shapes: Sequence[Shape]) -> tuple[TensorLists, ExampleArguments]:
    """Return example inputs for a signature: random values in [0.5, 1.5), the same in every call."""
    generator = torch.Generator().manual_seed(0)
    specs = [(shape, dtype, signature.device) for dtype in signature.dtypes for shape in shapes]
    for name, dtype, shape in signature.arguments:
        specs.append((shape, dtype, "cpu" if name == "scalars" else signature.device))
    # longer than needed: a graph with a wrong order of inputs must fail the comparison, not read out of bounds
    longer = [torch.rand(max(256, math.prod(s)), generator=generator, device="cpu") + 0.5 for s, _, _ in specs]
    made = [
        values.to(device, dtype)[: math.prod(shape)].view(shape)
        for values, (shape, dtype, device) in zip(longer, specs, strict=True)
    ]
    width, count = len(shapes), len(signature.dtypes)
    lists = [made[i * width : (i + 1) * width] for i in range(count)]
    return lists, {spec.name: tensor for spec, tensor in zip(signature.arguments, made[count * width :], strict=True)}


def _verified(signature: Signature, graph: Graph) -> Graph | None:
    """Return the graph, without the wrapper around its kernel if it can be, or None if it computes something else."""
    for candidate in (_unwrap_kernel(signature, graph), graph):
        if candidate is not None and _agrees_on_lanes(signature, candidate):
            return candidate
    return None


def _unwrap_kernel(signature: Signature, graph: Graph) -> Graph | None:
    """Return the same graph without the wrapper around its kernel, if one kernel is all there is to it."""
    rank, width = signature.rank, signature.lane.width
    shapes = [tuple(range(lane * rank + 1, lane * rank + 1 + rank)) for lane in range(width)]  # all different
    try:
        inputs = graph.order_inputs(shapes, *_examples(signature, shapes))
        found = only_kernel(graph.run, inputs, graph.inputs)
    except WRONG_INPUTS:
        return None
    return None if found is None else replace(graph, run=found[0], inputs=found[1], one_kernel=True)


def _agrees_on_lanes(signature: Signature, graph: Graph) -> bool:
    """Return True if the graph agrees with the eager program on lanes of several sizes, including one element.

    The gradients are passed in other shapes, to verify ``Backend.grads_by_address``.
    """
    rows = (5,) * (signature.rank - 1)
    shapes = [(*rows, (37, 1, 3, 8)[lane % 4]) for lane in range(signature.lane.width)]

    def run(lists: TensorLists, arguments: ExampleArguments) -> Sequence[Tensor]:
        given = [[grad.view(1, -1, 1) for grad in lists[0]], *lists[1:]]
        return graph(graph.order_inputs(shapes, given, arguments))

    return agrees(signature, shapes, run, WRONG_INPUTS)


def agrees(
    signature: Signature,
    shapes: Sequence[Shape],
    run: Callable[[TensorLists, ExampleArguments], Sequence[Tensor]],
    failures: tuple[type[Exception], ...] = (),
) -> bool:
    """Return True if ``run`` and the eager program compute the same on example tensors of these shapes.

    An exception of one of the ``failures`` types counts as disagreement.
    """
    lists, arguments = _examples(signature, shapes)
    expected_lists, expected_arguments = _examples(signature, shapes)
    try:
        outputs = run(lists, arguments)
    except failures:
        return False
    expected = signature.program(expected_lists, Arguments(**expected_arguments))
    pairs = [(a, b) for xs, ys in zip(lists, expected_lists, strict=True) for a, b in zip(xs, ys, strict=True)]
    if expected is not None:
        pairs.append((outputs[0], expected))
    tolerance = {torch.float16: 2e-2, torch.bfloat16: 2e-2}
    return all(
        torch.allclose(
            *(a.cpu().double(), b.cpu().double()),
            *(tolerance.get(b.dtype, 1e-3), tolerance.get(b.dtype, 1e-3)),
            equal_nan=True,
        )
        for a, b in pairs
    )


def disagreement(signature: Signature) -> BackendUnavailableError:
    """Return the error for a unit whose results differ from those of the eager program."""
    return BackendUnavailableError(
        f"the compiled code of {signature} does not compute what its eager form does, so it is not used: "
        f"torch {torch.__version__} is not supported on this machine; pass compile=False to run the same step eagerly"
    )


COMPILER_REMEDY = (
    "install a C++ compiler (for example the packages g++ and python3-dev) or name one in the environment variable "
    "CXX, or pass compile=False to run the same step eagerly"
)


def _innermost(compiled: Callable[..., Any]) -> Run:
    """Return the callable of Inductor's ``CompiledFxGraph`` inside its wrappers; without one, the outermost wrapper."""
    from torch._inductor.output_code import CompiledFxGraph

    layers: list[Any] = [compiled]
    seen = {id(compiled)}
    for layer in layers:
        if isinstance(layer, CompiledFxGraph) and layer.current_callable is not None:
            return layer.current_callable
        cells = inspect.getclosurevars(layer).nonlocals if inspect.isfunction(layer) else {}
        for inner in [*cells.values(), *getattr(layer, "__dict__", {}).values()]:
            if callable(inner) and not isinstance(inner, type) and id(inner) not in seen:
                seen.add(id(inner))
                layers.append(inner)
    return lambda arguments: compiled(*arguments)
