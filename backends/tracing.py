"""Trace a program into one graph of ATen operations, on fake tensors, without allocating or computing anything.

The tracer is ``make_fx``, which runs the rule once as ordinary Python. It does not use Dynamo, so Dynamo's caches,
guards, stances and environment variables cannot change what a unit computes.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_optim.backends.base import Shape, Signature
from compiled_optim.backends.decompositions import foreach_decompositions
from compiled_optim.backends.graph import CARRIES, CARRY, SIZES, Place
from compiled_optim.errors import RuleError, first_line
from compiled_optim.locations import definition, innermost_user_frame
from compiled_optim.program import Arguments, Program
from compiled_optim.quantization import BLOCK
from compiled_optim.tensors import dtype_of_sums
from compiled_optim.update_program import Phase, UpdateProgram


@dataclass
class TracedGraph:
    """A graph, example inputs to compile it with, and the place of each input."""

    module: torch.fx.GraphModule
    examples: list[Any]
    inputs: list[Place]


class SizeBounds(NamedTuple):
    """The smallest and the largest size of a dimension of a tensor of any size; None for no limit."""

    smallest: int = 0
    largest: int | None = None


def trace(
    signature: Signature,
    shapes: Sequence[Shape] | None = None,
    hint: int = 1 << 12,
    unbind_scalars: bool = False,
    decompose_foreach: bool = False,
    carries: Sequence[Place] = (),
    bounds: SizeBounds = SizeBounds(),  # noqa: B008
    scalars_on: str = "cpu",
) -> TracedGraph:
    """Trace a signature's program.

    Args:
        signature: what to trace.
        shapes: the shapes of the tensors; None traces for any size.
        hint: with ``shapes=None``, the number of elements a compiler should optimise for.
        unbind_scalars: pass each hyperparameter as a separate 0-dim tensor.
        decompose_foreach: replace foreach operations by one operation per tensor.
        carries: the places of further inputs, with a number for each row or column. The graph fills them with zeros.
        bounds: with ``shapes=None``, the smallest and the largest size of a dimension.
        scalars_on: the device of the hyperparameters.
    """
    from compiled_optim.torch_private import FakeTensorMode, ShapeEnv, enable_python_dispatcher, make_fx

    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        sizes = shapes or _any_sizes(signature, mode.shape_env, hint, bounds)
        examples = _example_inputs(signature, sizes, unbind_scalars, scalars_on)
        examples |= {place: empty_carry(signature, place, sizes[0], signature.device) for place in carries}
    places = list(examples)

    def flat(*inputs: Any) -> list[Tensor]:
        given = dict(zip(places, inputs, strict=True))
        lists = [[given[i, lane] for lane in range(_width(signature))] for i in range(len(signature.dtypes))]
        named: dict[str, Any] = {}
        for name, _, _ in signature.arguments:
            values = [value for (source, _), value in given.items() if source == name]
            named[name] = values if (name == "scalars" and unbind_scalars) or len(values) > 1 else values[0]
        program = signature.program
        if isinstance(program, UpdateProgram) and program.phase is Phase.STAGED:
            results = program.staged(lists, Arguments(**named))
        else:
            result = program(lists, Arguments(**named))
            results = [] if result is None else [result]
        for place in carries:
            given[place].zero_()
        return results

    table = foreach_decompositions() if decompose_foreach else {}
    try:
        with mode, enable_python_dispatcher(), torch.no_grad():
            module = make_fx(flat, decomposition_table=table)(*examples.values())
    except RuleError:
        raise
    except Exception as error:
        raise untraceable(signature.program, error) from error
    inputs = list(zip(examples.items(), list(module.graph.find_nodes(op="placeholder")), strict=True))
    kept = [(place, example) for (place, example), node in inputs if node.users or place[0] == SIZES]
    for (place, _), node in inputs:
        if not (node.users or place[0] == SIZES):
            module.graph.erase_node(node)
    module.recompile()
    return TracedGraph(module, [example for _, example in kept], [place for place, _ in kept])


def untraceable(program: Program, error: Exception) -> RuleError:
    """Return the error for an update that cannot be traced."""
    update = getattr(program, "update", type(program))
    where = innermost_user_frame(traceback.extract_tb(error.__traceback__)) or definition(update)
    remedy = "compute with torch operations only, on the lists it gets; use compile=False to inspect values"
    return RuleError(f"{update.__qualname__} cannot be compiled as one graph ({first_line(error)})", where, remedy)


def _width(signature: Signature) -> int:
    return signature.lane.width or len(signature.lane.shapes)


def unit_sum_dtype(signature: Signature) -> torch.dtype:
    """Return the dtype in which a program sums on its device."""
    return dtype_of_sums(signature.program.dtype, torch.device(signature.device))


def empty_carry(signature: Signature, place: Place, sizes: Sequence[Any], device: str) -> Tensor:
    """Return a tensor for the values of rows or columns that a pass over a chunk of these sizes carries to later ones.

    For a chunk of a matrix it has two dimensions, as means over rows and columns have.
    """
    assert place[0] in CARRIES
    if not is_split(signature):
        return torch.empty(sizes[:1], dtype=unit_sum_dtype(signature), device=device)
    shape = (sizes[0], 1) if place[0] == CARRY else (1, sizes[1])
    return torch.empty(shape, dtype=signature.program.dtype, device=device)


def is_split(signature: Signature) -> bool:
    """Return True if a unit sees rows of a matrix, as a 2-D tensor, and not a stack of whole matrices."""
    return signature.rank == 2 and isinstance(signature.program, UpdateProgram) and bool(signature.program.split)


def _any_sizes(signature: Signature, shape_env: Any, hint: int, bounds: SizeBounds) -> list[Any]:
    """Return symbolic shapes, one for each tensor of a list.

    The symbols are unbacked, because backed symbols specialise on the sizes 0 and 1.
    """
    size_hint = round(hint ** (1 / signature.rank))
    shapes = []
    with shape_env.ignore_fresh_unbacked_symbols():
        for _ in range(_width(signature)):
            sizes = [shape_env.create_unbacked_symint() for _ in range(signature.rank)]
            for size in sizes:
                torch._check(size >= bounds.smallest)  # type: ignore[no-untyped-call]
                if bounds.largest is not None:
                    torch._check(size <= bounds.largest)  # type: ignore[no-untyped-call]
                shape_env.var_to_hint_override[size.node.expr] = size_hint
            shapes.append((*sizes[:1], *(compiled_sizes(signature) or sizes[1:])))
    return shapes


def compiled_sizes(signature: Signature) -> Shape:
    """Return the sizes of all dimensions but the first, if they are compiled in, else an empty tuple."""
    if has_whole_blocks(signature):
        return (BLOCK,)
    return signature.lane.shapes[0][1:] if signature.lane.shapes else ()


def has_whole_blocks(signature: Signature) -> bool:
    """Return True if all blocks of a tensor have BLOCK elements, so that their length is compiled in.

    On a GPU a block then stays in registers between the two times that its elements are needed: for the scale, and for
    the codes.
    """
    return signature.program.has_blocks and not signature.device.startswith("cpu")


def _example_inputs(
    signature: Signature, shapes: Sequence[Any], unbind_scalars: bool, scalars_on: str
) -> dict[Place, Any]:
    """Return fake inputs by place: symbolic sizes, lists, arguments."""
    sizes = [size for shape in shapes for size in shape]
    found: dict[Place, Any] = {(SIZES, i): size for i, size in enumerate(sizes) if isinstance(size, torch.SymInt)}
    for i, dtype in enumerate(signature.dtypes):
        for lane, shape in enumerate(shapes):
            found[i, lane] = torch.empty(signature.program.list_shape(i, shape), dtype=dtype, device=signature.device)
    for name, dtype, shape in signature.arguments:
        if name == "scalars" and unbind_scalars:  # in host memory
            found |= {(name, i): torch.empty((), dtype=dtype, device="cpu") for i in range(shape[0])}
        else:
            place = name, sum(source == name for source, _ in found)  # the totals of several stages have one name
            found[place] = torch.empty(shape, dtype=dtype, device=signature.device)
    return found
