"""Compiling a program with Inductor and getting hold of the compiled graph itself.

``torch.compile`` is used once for each signature, to trace and compile on inputs of our own making. After that the
compiled graph is called directly. Dynamo's frame evaluation, guards and caches are not on the way: a call costs a
quarter, ``torch._dynamo.reset()`` and stances of the user's program cannot send a step elsewhere, and no unit can be
reached with inputs of another signature. What the graph assumes is exactly the :class:`Signature`.

Limits: relies on Dynamo leaving the example value of every graph input in its metadata (``grapharg``, torch 2.13);
should that move, :func:`capture` raises instead of guessing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from compiled_optim.backends.base import Signature
from compiled_optim.errors import BackendUnavailableError

SIZES = -1
"""In :attr:`Graph.inputs`, stands for the list index where a lane's number of elements is passed, not a tensor."""

SHARED = -2
"""In :attr:`Graph.inputs`, stands for the list index of the tensors shared by all lanes."""


@dataclass
class Graph:
    """A compiled graph and where each of its inputs comes from: ``(list, lane)``, with SIZES and SHARED as lists."""

    call: Callable[..., Sequence[Tensor]]
    inputs: list[tuple[int, int]]
    kernels: int
    seconds: float


def capture(signature: Signature, hint: int, options: Mapping[str, Any]) -> Graph:
    """Compile a signature's program over 1-D tensors of any length, its inputs made up here.

    Args:
        signature: what to compile; its lane's width is the length of the lists.
        hint: the length Inductor should optimise for.
        options: Inductor settings for this compilation only.
    """
    import torch._dynamo
    import torch._inductor.exc
    from torch._dynamo.decorators import mark_unbacked
    from torch._inductor import metrics
    from torch._inductor.compile_fx import compile_fx

    with torch.inference_mode(False), torch.no_grad():
        device, width = signature.device, signature.lane.width
        lists = [[torch.ones(2, dtype=dtype, device=device) for _ in range(width)] for dtype in signature.dtypes]
        shared = [torch.ones(shape, dtype=dtype) for dtype, shape in signature.shared]
        for tensors in lists:
            for lane, tensor in enumerate(tensors):
                # unbacked: correct for 0 and 1 elements too, which backed dynamic sizes specialise on
                mark_unbacked(tensor, 0, hint_override=hint, shape_id=f"lane{lane}")

        graphs: list[Graph] = []

        def compiler(module: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
            inputs = _origins(module, lists, shared)
            call = compile_fx(module, examples, config_patches=dict(options))
            graphs.append(Graph(call, inputs, kernels=0, seconds=0.0))
            return call

        kernels, start = metrics.generated_kernel_count, time.perf_counter()
        try:
            with torch._dynamo.config.patch(do_not_emit_runtime_asserts=True):
                torch.compile(
                    _unshared(signature),
                    backend=compiler,
                    fullgraph=True,
                    dynamic=False,
                    options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
                )(lists, shared)
        except torch._inductor.exc.InvalidCxxCompiler as error:
            raise BackendUnavailableError(f"{error}; {COMPILER_REMEDY}") from None
        except torch._inductor.exc.CppCompileError as error:
            raise BackendUnavailableError(f"the C++ compiler failed on a step: {error}\n{COMPILER_REMEDY}") from None
    if len(graphs) != 1:
        raise BackendUnavailableError(
            f"torch.compile did not compile {signature}: it is disabled here, by TORCHDYNAMO_DISABLE, "
            "torch._dynamo.config.disable or torch.compiler.set_stance; enable it, or pass compile=False to run eagerly"
        )
    graphs[0].kernels = metrics.generated_kernel_count - kernels
    graphs[0].seconds = time.perf_counter() - start
    return graphs[0]


COMPILER_REMEDY = (
    "install a C++ compiler (for example the packages g++ and python3-dev) or name one in the environment variable "
    "CXX, or pass compile=False to run the same step eagerly"
)


def _unshared(signature: Signature) -> Callable[..., Any]:
    """The program as a function whose code object is its own: Dynamo caches by code object, not by function."""
    program = signature.program

    def step(lists: Any, shared: Any) -> Any:
        return program(lists, shared)

    code = step.__code__.replace(co_name=f"compiled_optim_{program.name}")
    return FunctionType(code, step.__globals__, code.co_name, None, step.__closure__)


def _origins(
    module: torch.fx.GraphModule, lists: Sequence[list[Tensor]], shared: Sequence[Tensor]
) -> list[tuple[int, int]]:
    """For each input of the graph, the list and lane it was traced from."""
    places = {id(tensor): (i, lane) for i, tensors in enumerate(lists) for lane, tensor in enumerate(tensors)}
    places |= {id(tensor): (SHARED, i) for i, tensor in enumerate(shared)}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    examples = [node.meta["example_value"] for node in placeholders]
    tensors = {
        node: places[id(node.meta["grapharg"].example)]
        for node, example in zip(placeholders, examples, strict=True)
        if isinstance(example, Tensor)
    }
    lane_of_symbol = {str(node.meta["example_value"].size(0)): lane for node, (i, lane) in tensors.items() if i != SHARED}
    return [
        tensors[node] if node in tensors else (SIZES, lane_of_symbol[str(example)])
        for node, example in zip(placeholders, examples, strict=True)
    ]
