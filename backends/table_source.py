"""Write the C++ source of a table unit: the kernels that Inductor generated, and the driver that runs them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import torch

from compiled_optim.backends import table_vectors as vectors
from compiled_optim.backends.base import Signature
from compiled_optim.backends.graph import CARRY, COLUMN_CARRY, Place
from compiled_optim.backends.precompiled_header import HEADER
from compiled_optim.backends.recording import Argument, CannotRecord, Extent, Pointer, Recording
from compiled_optim.backends.table_passes import UPDATE, CompiledPasses, columns_name, measure_name
from compiled_optim.backends.tracing import compiled_sizes

DRIVER = Path(__file__).with_name("table_driver.cpp")

HEADERS = f"""\
#include <{HEADER}>
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <algorithm>
#include <atomic>
#include <memory>
#include <omp.h>
#include <thread>
"""

SCRATCH = """
// memory for the temporaries of a chunk, one block for each thread
static char* scratch_memory(int64_t bytes) {
    static thread_local std::unique_ptr<char[]> memory;
    static thread_local int64_t size = 0;
    if (bytes > size) {
        memory.reset(new char[bytes + 64]);
        size = bytes;
    }
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
}
"""

PARTS = """
// a few blocks at a time, so that the temporaries stay in the first-level cache
static void {name}({parameters}) {{
    constexpr int64_t BLOCKS = 8;
    for (int64_t done = 0; done < size0; done += BLOCKS)
        {name}_part(pointers, scalars, inv_scale, grad_scale, totals, sums, row + done, first + done * size1,
                    std::min(BLOCKS, size0 - done), size1, matrix);
}}
"""

PARAMETERS = (
    "void* const* pointers, const Scalar* scalars, const Scalar* inv_scale, const Scalar* grad_scale, double* totals, "
    "double* sums, int64_t row, int64_t first, int64_t size0, int64_t size1, int64_t matrix"
)


def write_source(
    made: CompiledPasses,
    starts: Sequence[str],
    scalars: int,
    dtype: torch.dtype,
    has_blocks: bool = False,
) -> str:
    """Return the source of a unit.

    Args:
        made: the passes.
        starts: for each list of tensors, gradients first, the expression of the element with which a chunk starts.
        scalars: the number of values in a row.
        dtype: the dtype of the scalars.
        has_blocks: whether the rows are blocks, of few elements.
    """
    kernels = [_pass_source(made, name, starts, has_blocks and name == UPDATE) for name in made.recordings]
    stages = len(made.sums)
    constants = {"LISTS": len(starts), "CARRIES": made.carries, "COLUMN_CARRIES": made.column_carries}
    constants |= {"WIDTH": scalars, "STAGES": stages, "SUMS": sum(made.sums), "KNOWN": made.known}
    constants |= {"MEANS": len(made.means)}
    mean_of = {stage: number for number, (stage, _) in enumerate(made.means)}
    columns = [columns_name(stage) for stage in range(stages)]
    parts = [
        HEADERS,
        f"using Scalar = {'double' if dtype == torch.float64 else 'float'};",
        *(f"constexpr int64_t {name} = {value};" for name, value in constants.items()),
        _array("int64_t", "FIRST_SUM", map(made.first_total, range(stages)), sum(made.sums)),
        _array("int64_t", "MEAN_OF", (mean_of.get(stage, -1) for stage in range(stages)), -1),
        _array("bool", "MEANS_BY_COLUMNS", (int(by_columns) for _, by_columns in made.means), 0),
        f"constexpr bool UPDATES = {str(UPDATE in made.recordings).lower()};",
        SCRATCH,
        vectors.HELPERS if any(map(vectors.uses_helpers, kernels)) else "",  # which code without vectors cannot have
        *kernels,
        "" if UPDATE in made.recordings else f"static void {UPDATE}({PARAMETERS});",
        f"using Pass = void (*)({PARAMETERS});",
        _array("Pass", "MEASURES", map(measure_name, range(stages)), "nullptr"),
        _array("Pass", "COLUMNS", (name if name in made.recordings else "nullptr" for name in columns), "nullptr"),
        _driver(),
    ]
    return "\n".join(parts)


def _array(kind: str, name: str, values: Iterable[str | int], end: str | int) -> str:
    """Return the declaration of a constant array. It gets an element at its end, because it cannot be empty."""
    return f"constexpr {kind} {name}[] = {{{', '.join(map(str, (*values, end)))}}};"


def list_starts(signature: Signature) -> list[str]:
    """Return for each list the expression of the element with which a chunk starts."""
    program, lists = signature.program, range(len(signature.dtypes))
    if sizes := compiled_sizes(signature):  # a chunk consists of whole matrices
        return [f"row * {math.prod(program.list_shape(number, (1, *sizes)))}" for number in lists]
    # by the shape of a tensor that belongs to a parameter of shape (0, 0)
    starts = {(0, 0): "first", (0, 1): "row", (0,): "row", (1, 0): "matrix * size1", (1, 1): "matrix"}
    return [starts[program.list_shape(number, (0, 0))] if signature.rank > 1 else "first" for number in lists]


@lru_cache
def _driver() -> str:
    return DRIVER.read_text()


def _pass_source(made: CompiledPasses, name: str, starts: Sequence[str], in_parts: bool) -> str:
    """Return the kernels of a pass, and a function that calls them on one chunk of one tensor, or on its parts."""
    recording = made.recordings[name]
    output = recording.output
    if output is not None and recording.temporaries[output].dtype != torch.float64:
        raise CannotRecord("its sums are not float64")
    kernels, calls = [], []
    for number, call in enumerate(recording.calls):
        kernel = f"{name}_{number}"
        source, found = re.subn(r'extern "C"\s+void\s+kernel\(', f"static void {kernel}(", call.source)
        if found != 1:
            raise CannotRecord(f"its C++ source has {found} functions named kernel")
        kernels.append(_with_own_memory(vectors.improve(source), call.arguments))
        arguments = [
            _size(argument) if isinstance(argument, Extent) else _pointer(made, recording, kind, argument, starts)
            for kind, argument in zip(call.types, call.arguments, strict=True)
        ]
        calls.append(f"    {kernel}({', '.join(arguments)});")
    body = [*_temporaries(recording), *calls]
    if not in_parts:
        return "\n".join([*kernels, f"static void {name}({PARAMETERS}) {{", *body, "}"])
    parts = PARTS.format(name=name, parameters=PARAMETERS)
    return "\n".join([*kernels, f"static void {name}_part({PARAMETERS}) {{", *body, "}", parts])


def _with_own_memory(source: str, arguments: Sequence[Argument]) -> str:
    """Tell the compiler which pointers of a kernel point to memory that no other pointer can write to.

    It then computes what depends on scalars only once, and not again after each store. It cannot be told so of
    parameters, gradients and states: they are the user's, and may overlap.
    """
    memory = [argument.temporary if isinstance(argument, Pointer) else argument for argument in arguments]
    head, opening, rest = source.partition("(")
    parameters, closing, body = rest.partition(")")
    declared = parameters.split(",")
    for i, argument in enumerate(arguments):
        is_ours = isinstance(argument, Pointer) or isinstance(argument[0], str)
        if is_ours and memory.count(memory[i]) == 1:
            declared[i] = declared[i].replace("*", "* __restrict__", 1)
    return "".join([head, opening, ",".join(declared), closing, body])


def _temporaries(recording: Recording) -> list[str]:
    """Return the lines that place the temporaries of a chunk into scratch memory, aligned to cache lines."""
    lines = ["    int64_t bytes = 0;"]
    kept = [number for number in range(len(recording.temporaries)) if number != recording.output]
    for number in kept:
        dtype, extent = recording.temporaries[number]
        lines.append(f"    const int64_t offset{number} = bytes;")
        lines.append(f"    bytes += ({_size(extent)} * {dtype.itemsize} + 63) / 64 * 64;")
    return [*lines, "    char* scratch = scratch_memory(bytes);"] if kept else []


def _size(extent: Extent) -> str:
    return " * ".join([str(extent.factor), *(f"size{dim}" for dim in extent.dims)])


def _pointer(
    made: CompiledPasses, recording: Recording, kind: str, argument: Place | Pointer, starts: Sequence[str]
) -> str:
    """Return the expression of a pointer. The gradient, the parameter and the states start at the chunk."""
    if isinstance(argument, Pointer):
        number, offset = argument
        base = "reinterpret_cast<char*>(sums)" if number == recording.output else f"scratch + offset{number}"
        return f"reinterpret_cast<{kind}>({base} + {offset})"
    source, index = argument
    if source == CARRY:
        return f"reinterpret_cast<{kind}>(pointers[LISTS + {index}]) + row"
    if source == COLUMN_CARRY:
        return f"reinterpret_cast<{kind}>(pointers[LISTS + CARRIES + {index}]) + matrix * size1"
    if source == "totals":
        return f"reinterpret_cast<{kind}>(totals) + {made.first_total(index)}"
    if isinstance(source, str):
        return f"reinterpret_cast<{kind}>({source})"
    return f"reinterpret_cast<{kind}>(pointers[{source}]) + {starts[source]}"
