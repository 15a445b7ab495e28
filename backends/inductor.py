"""Compiling a program with Inductor and getting hold of the compiled graph itself.

``torch.compile`` is used once for each signature, to trace and compile on inputs of our own making. After that the
graph Inductor made is called directly. Dynamo's frame evaluation, guards and caches and AOTAutograd's wrappers are not
on the way: a call of 4 tensors takes 2.3 µs instead of 41, ``torch._dynamo.reset()`` and stances of the user's program
cannot send a step elsewhere, and no unit can be reached with inputs of another signature. What the graph assumes is
exactly the :class:`Signature`.

Limits: this relies on Dynamo leaving the example value of every graph input in its metadata (``grapharg``) and on
Inductor's ``CompiledFxGraph``, both private. So each graph, fresh from the compiler or from disk, is run once against
the eager program, and not used if the two disagree.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from subprocess import CalledProcessError
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from compiled_optim.backends import store
from compiled_optim.backends.base import Signature
from compiled_optim.backends.direct import only_kernel
from compiled_optim.backends.graph import SHARED, SIZES, Graph, Place
from compiled_optim.contract import untraceable
from compiled_optim.errors import BackendUnavailableError
from compiled_optim.program import Program, TensorLists

Run = Callable[[list[Any]], Sequence[Tensor]]
Lowered = tuple[Run, int]
"""A compiled graph's entry and the number of its kernels."""


def capture(
    signature: Signature, hint: int, options: Mapping[str, Any], passes: Callable[[], Mapping[str, Any]] = dict
) -> Graph:
    """Compile a signature's program over tensors of any size, on inputs made up here.

    Args:
        signature: what to compile; its lane's width is the length of the lists.
        hint: the number of elements Inductor should optimise for.
        options: Inductor settings for this compilation only.
        passes: makes further ones, which are code of this package and no part of what a graph on disk is known by.
    """
    start = time.perf_counter()
    key = settings(hint, options)
    with torch.inference_mode(False), torch.no_grad():
        known = store.load(signature, key)
        graph = Graph(*known, from_disk=True) if known is not None else None
        if graph is None or not _agrees(signature, graph):
            graph = _compile(signature, hint, {**options, **passes()})
            if not _agrees(signature, graph):
                raise disagreement(signature)
            store.save(signature, key, graph.run, graph.inputs, graph.kernels)
        graph = _straightened(signature, graph)
    graph.seconds = time.perf_counter() - start
    return graph


def settings(hint: int, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a graph depends on besides its signature: it is kept on disk under both."""
    return {**options, "hint": hint}


def _compile(signature: Signature, hint: int, options: Mapping[str, Any]) -> Graph:
    """Trace the program over lanes of any size and compile it."""
    from torch._dynamo.decorators import mark_unbacked

    lists, shared = _examples(signature, [(2,) * signature.rank] * signature.lane.width)
    for tensors in lists:
        for lane, tensor in enumerate(tensors):
            for dim in range(signature.rank):
                # unbacked: correct for sizes 0 and 1 too, which backed dynamic sizes specialise on
                size_hint = round(hint ** (1 / signature.rank))
                mark_unbacked(tensor, dim, hint_override=size_hint, shape_id=f"lane{lane}.{dim}")
    return trace(signature, lists, shared, lambda module, inputs: lower(module, inputs, options))


def lower(module: torch.fx.GraphModule, examples: list[Any], options: Mapping[str, Any]) -> Lowered:
    """Compile a traced graph with Inductor; the options are its settings for this compilation only."""
    from torch._inductor import metrics
    from torch._inductor.compile_fx import compile_fx

    kernels = metrics.generated_kernel_count
    compiled: Any = compile_fx(module, examples, config_patches=dict(options))
    return _innermost(compiled), metrics.generated_kernel_count - kernels


def trace(
    signature: Signature,
    lists: TensorLists,
    shared: Sequence[Tensor],
    lower: Callable[[torch.fx.GraphModule, list[Any]], Lowered],
) -> Graph:
    """Trace a signature's program on these inputs with Dynamo, as one graph, and lower that; nothing is run."""
    import torch._dynamo
    from torch._inductor import exc

    graphs: list[Graph] = []

    def compiler(module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., tuple[None]]:
        inputs = _origins(module, lists, shared)
        run, kernels = lower(module, examples)
        graphs.append(Graph(run, inputs, kernels))
        return lambda *arguments: (None,)

    try:
        # the sizes of a lane's tensors are equal because we cut them so: no assertion in every call
        with torch._dynamo.config.patch(do_not_emit_runtime_asserts=True):
            torch.compile(
                _unshared(signature.program),
                backend=compiler,
                fullgraph=True,
                dynamic=False,
                options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
            )(lists, shared)
    except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.TorchRuntimeError) as error:
        raise untraceable(signature.program, error) from error
    except exc.InductorError as error:
        cause = error.inner_exception
        if isinstance(cause, exc.InvalidCxxCompiler | exc.CppCompileError | CalledProcessError):
            raise BackendUnavailableError(f"the C++ compiler does not work: {cause}\n{COMPILER_REMEDY}") from None
        if isinstance(cause, OSError):
            raise store.unusable(cause) from error
        raise
    except RuntimeError as error:
        if "no compiled frames" not in str(error):
            raise
    if len(graphs) != 1:
        raise BackendUnavailableError(
            f"torch.compile did not compile {signature}: it is disabled here, by TORCHDYNAMO_DISABLE, "
            "torch._dynamo.config.disable or torch.compiler.set_stance; enable it, or pass compile=False to run eagerly"
        )
    return graphs[0]


def _examples(signature: Signature, shapes: Sequence[tuple[int, ...]]) -> tuple[TensorLists, list[Tensor]]:
    """Inputs of a signature, all different and away from zero, the same every time."""
    generator = torch.Generator().manual_seed(0)

    def example(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
        # with room behind: a graph that took one input for another must fail _agrees, not the process
        values = torch.rand(max(256, math.prod(shape)), generator=generator, device="cpu") + 0.5
        return values.to(device, dtype)[: math.prod(shape)].view(shape)

    lists = [[example(shape, dtype, signature.device) for shape in shapes] for dtype in signature.dtypes]
    # the scalars, which come first, are always in host memory
    shared = [example(s, dtype, signature.device if i else "cpu") for i, (dtype, s) in enumerate(signature.shared)]
    return lists, shared


def _straightened(signature: Signature, graph: Graph) -> Graph:
    """The same graph without the wrapper around its kernel, if that is all there is to it."""
    rank, width = signature.rank, signature.lane.width
    shapes = [tuple(range(lane * rank + 1, lane * rank + 1 + rank)) for lane in range(width)]  # no number twice
    arguments = graph.arguments(shapes, *_examples(signature, shapes))
    found = only_kernel(graph.run, arguments, graph.inputs)
    if found is None:
        return graph
    shorter = replace(graph, run=found[0], inputs=found[1], one_kernel=True)
    return shorter if _agrees(signature, shorter) else graph


def _agrees(signature: Signature, graph: Graph) -> bool:
    """Whether the graph computes what the eager program does, on lanes of several sizes, one element among them.

    The gradients are given in other shapes: generated code takes their address, and this is relied upon.
    """
    rows = (5,) * (signature.rank - 1)
    shapes = [(*rows, (37, 1, 3, 8)[lane % 4]) for lane in range(signature.lane.width)]
    wrong_inputs = (IndexError, KeyError, RuntimeError, TypeError)

    def run(lists: TensorLists, shared: Sequence[Tensor]) -> Sequence[Tensor]:
        given = [[grad.view(1, -1, 1) for grad in lists[0]], *lists[1:]]
        return graph(graph.arguments(shapes, given, shared))

    return agrees(signature, shapes, run, wrong_inputs)


def agrees(
    signature: Signature,
    shapes: Sequence[tuple[int, ...]],
    run: Callable[[TensorLists, Sequence[Tensor]], Sequence[Tensor]],
    failures: tuple[type[Exception], ...] = (),
) -> bool:
    """Whether ``run`` computes what the eager program does, on made-up tensors of these shapes; failures do not."""
    lists, shared = _examples(signature, shapes)
    expected_lists, expected_shared = _examples(signature, shapes)
    try:
        outputs = run(lists, shared)
    except failures:
        return False
    expected = signature.program(expected_lists, expected_shared)
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
    """The error for a unit that computes something else."""
    return BackendUnavailableError(
        f"the compiled code of {signature} does not compute what its eager form does, so it is not used: "
        f"torch {torch.__version__} is not supported here. compile=False runs the same step eagerly"
    )


COMPILER_REMEDY = (
    "install a C++ compiler (for example the packages g++ and python3-dev) or name one in the environment variable "
    "CXX, or pass compile=False to run the same step eagerly"
)


def _unshared(program: Program) -> Callable[..., Any]:
    """The program as a function whose code object is its own: Dynamo caches by code object, not by function."""

    def step(lists: Any, shared: Any) -> Any:
        return program(lists, shared)

    code = step.__code__.replace(co_name=f"compiled_optim_{program.name}")
    return FunctionType(code, step.__globals__, code.co_name, None, step.__closure__)


def _origins(module: torch.fx.GraphModule, lists: TensorLists, shared: Sequence[Tensor]) -> list[Place]:
    """For each input of the graph, the list and lane it was traced from."""
    given = {id(tensor): (i, lane) for i, tensors in enumerate(lists) for lane, tensor in enumerate(tensors)}
    given |= {id(tensor): (SHARED, i) for i, tensor in enumerate(shared)}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    examples = {node: node.meta["example_value"] for node in placeholders}
    origins = {
        node: given[id(node.meta["grapharg"].example)] for node in placeholders if isinstance(examples[node], Tensor)
    }
    # what is not a tensor is the size of a lane in one dimension
    places: dict[str, int] = {}
    for node, (i, lane) in origins.items():
        if i != SHARED:
            shape = examples[node].shape
            places |= {str(size): lane * len(shape) + dim for dim, size in enumerate(shape)}
    return [origins[node] if node in origins else (SIZES, places[str(examples[node])]) for node in placeholders]


def _innermost(compiled: Callable[..., Any]) -> Run:
    """Inductor's own entry into the graph, from within the layers wrapped around it; the outermost if there is none."""
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
