"""Write the Triton source of a table unit: the kernels that Inductor generated, and a driver for each pass.

A program of a driver is a task: one pass over one chunk of one tensor. It reads the addresses of its tensor and its row
of hyperparameters from the table, and calls the generated kernels, block by block, on the memory of its chunk.

Inductor's kernels get their place from the number of the program. Here the number is replaced by 0 and the pointers are
moved instead, so 32-bit indices are enough for any tensor. Memory is loaded 16 bytes at a time where all pointers of a
chunk are aligned, which each program finds out for itself; the elements left over are loaded one by one, one for each
thread, because several for each thread would need many registers.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from compiled_optim.backends.graph import CARRY, Place
from compiled_optim.backends.recording import CannotRecord, Extent, KernelCall, Pointer
from compiled_optim.backends.table_passes import MEASURE, UPDATE, CompiledPasses
from compiled_optim.backends.triton_kernels import as_function, with_helpers
from compiled_optim.quantization import BLOCK

HEADER = """\
import triton
import triton.language as tl
from triton.language import math as tl_math
from triton.language.extra import libdevice
"""

WARPS = 8
THREADS = 32 * WARPS
WIDE = 32
"""Rows with more columns than this are processed a few at a time, shorter rows many at a time."""

DTYPES = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.uint8: "tl.uint8",
}
TABLE = ("tasks", "grads", "row_of", "fixed", "columns", "first_rows")
"""The parameters of every driver; the others depend on the kernels."""


class Scratch(NamedTuple):
    """A temporary of a driver: a number of values for each row, or for each task (``of`` is "rows" or "tasks")."""

    name: str
    dtype: str
    values: int
    of: str


def write_source(
    made: CompiledPasses,
    dtypes: Sequence[torch.dtype],
    row_lists: Collection[int],
    rank: int,
    scalars: int,
    sum_dtype: torch.dtype,
    skips: bool = False,
) -> str:
    """Return the source of a module with the drivers of a unit.

    Args:
        made: the passes.
        dtypes: the dtypes of the lists of tensors, gradients first.
        row_lists: the numbers of the lists that have a number for each row.
        rank: the number of dimensions of the tensors.
        scalars: the number of values in a row of hyperparameters.
        sum_dtype: the dtype of the sums and of the values that are carried.
        skips: let the drivers do nothing if ``found_inf`` is not 0.
    """
    passes = {name: _Pass(made, name, dtypes, row_lists, rank, scalars, skips) for name in made.recordings}
    kernels = "\n\n".join(text for each in passes.values() for text in each.kernels)
    scratch = [tuple(item) for each in passes.values() for item in each.scratch]
    constants = {
        "STAGES": made.sums,
        "KNOWN": made.known,
        "UPDATES": UPDATE in made.recordings,
        "CARRIES": made.carries,
        "SUM_DTYPE": _name(sum_dtype),
        "SCRATCH": scratch,
        "WARPS": WARPS,
    }
    parts = [
        HEADER,
        "\n".join(f"{name} = {value!r}" for name, value in constants.items()),
        with_helpers(kernels),
        *(each.driver() for each in passes.values()),
    ]
    return "\n\n".join(parts) + "\n"


class _Pass:
    """The kernels and the driver of one pass."""

    def __init__(
        self,
        made: CompiledPasses,
        name: str,
        dtypes: Sequence[torch.dtype],
        row_lists: Collection[int],
        rank: int,
        scalars: int,
        skips: bool,
    ) -> None:
        self._made, self._name, self._recording = made, name, made.recordings[name]
        recording = self._recording
        self._dtypes, self._row_lists, self._rank, self._scalars = dtypes, row_lists, rank, scalars
        vector = 16 // min(dtype.itemsize for dtype in dtypes)
        self._block = THREADS * vector
        # parameters of the driver, in order of their first use
        self._used: dict[str, None] = {"found_inf": None} if skips else {}
        self.scratch: list[Scratch] = []
        self.kernels: list[str] = []
        self._places = {number: self._place_temporary(number) for number in range(len(recording.temporaries))}
        self._lines: list[str] = []
        for number, call in enumerate(recording.calls):
            if number:  # what one kernel stored is read by other threads
                self._lines.append("tl.debug_barrier()")
            self._lines += self._call_lines(f"{name}_{number}", call)

    def driver(self) -> str:
        """Return the function that runs this pass over a chunk."""
        names = [*TABLE, *self._used]
        places = [place for call in self._recording.calls for place in call.arguments]
        lists = sorted({int(place[0]) for place in places if _is_list(place)})
        of_elements = [i for i in lists if i not in self._row_lists]
        fixed = len(self._dtypes) - 1
        size = "tl.load(columns + tensor)" if self._rank > 1 else "1"
        columns = "columns_" if self._rank > 1 else "1"
        lines = [
            *(f"address{i} = tl.load(fixed + tensor * {fixed} + {i - 1})" for i in lists if i),
            *(f"base{i} = address{i}.to(tl.pointer_type({DTYPES[self._dtypes[i]]}))" for i in lists),
            f"offset = start * {size}",
            f"elements = length * {columns}",
            *(f"first{i} = address{i} + offset * {self._dtypes[i].itemsize}" for i in of_elements),
            f"aligned = (({' | '.join(f'first{i}' for i in of_elements) or '1'}) & 15) == 0",
            "row = tl.load(row_of + tensor)" if {"scalars", "grad_scale"} & {*self._used} else "",
            "first_row = tl.load(first_rows + tensor) + start" if self._rank > 1 else "",
            *self._lines,
        ]
        head = [
            "task = tl.program_id(0).to(tl.int64)",
            "tensor = tl.load(tasks + 4 * task)",
            "start = tl.load(tasks + 4 * task + 1)",
            "length = tl.load(tasks + 4 * task + 2).to(tl.int32)",
            "columns_ = tl.load(tasks + 4 * task + 3).to(tl.int32)" if self._rank > 1 else "",
            "address0 = tl.load(grads + tensor)",
            "if (address0 != 0) & (tl.load(found_inf) == 0):" if "found_inf" in self._used else "if address0 != 0:",
        ]
        # no compilation depends on the numbers or on the alignment of the table
        quoted = ", ".join(f'"{name}"' for name in names)
        decorator = f"@triton.jit(do_not_specialize=[{quoted}], do_not_specialize_on_alignment=[{quoted}])"
        body = [*filter(None, head), *textwrap.indent("\n".join(filter(None, lines)), "    ").splitlines()]
        return "\n".join([decorator, f"def {self._name}({', '.join(names)}):", *(f"    {line}" for line in body)])

    def _place_temporary(self, number: int) -> str:
        """Return the expression of the memory of a temporary for this task; ``{b}`` is the first row of the block."""
        dtype, extent = self._recording.temporaries[number]
        if number == self._recording.output:
            self._used["partials"] = None
            return ""
        if extent.dims not in ((), (0,)) or (extent.dims == (0,) and self._rank == 1):
            raise CannotRecord("it needs a temporary as large as a tensor")
        name = f"{self._name}_scratch{number}"
        of = "rows" if extent.dims else "tasks"
        self.scratch.append(Scratch(name, _name(dtype), extent.factor, of))
        self._used[name] = None
        start = "(first_row + {b})" if extent.dims else "task"
        return f"{name} + {start} * {extent.factor}"

    def _call_lines(self, kernel: str, call: KernelCall) -> list[str]:
        """Add a kernel, and return the lines that call it on all blocks of a chunk."""
        text, names = as_function(call.source, kernel)
        self.kernels.append(text)
        blocks = [name for name in names if name.endswith("BLOCK")]
        given = dict(zip(names, zip(call.types, call.arguments, strict=True), strict=False))
        numels = {name: argument for name, (_, argument) in given.items() if name.endswith("numel")}
        pointers = [place for kind, place in given.values() if kind.startswith("*")]
        by_elements = any(_is_list(place) and place[0] not in self._row_lists for place in pointers)
        by_rows = any(place[0] == CARRY or self._is_of_rows(place) for place in pointers)

        def line(**changes: str) -> str:
            texts = [changes.get(name) or self._argument(*given[name], changes) for name in names]
            return f"{kernel}({', '.join(texts)})"

        one, columns = Extent(1, ()), Extent(1, (1,))
        elements, rows = (Extent(1, (0, 1)), Extent(1, (0,))) if self._rank > 1 else (Extent(1, (0,)), None)
        loop, reduction, tiles = ["XBLOCK"], ["XBLOCK", "R0_BLOCK"], ["YBLOCK", "XBLOCK"]
        if blocks == loop and numels == {"xnumel": elements} and not by_rows:
            return self._over_elements(line)
        if blocks == reduction and numels == {"xnumel": one, "r0_numel": elements} and not by_rows:
            return self._sum_of_elements(line)
        if blocks == reduction and numels == {"xnumel": one, "r0_numel": rows} and not by_elements:
            return [line(xnumel="1", r0_numel="length", XBLOCK="1", R0_BLOCK=str(THREADS))]
        if blocks == reduction and numels == {"xnumel": rows, "r0_numel": columns}:
            return self._over_rows(line, blocks, list(numels))
        if blocks == loop and numels == {"xnumel": rows, "r0_numel": columns}:
            return self._over_blocks(line)
        if blocks == tiles and numels == {"ynumel": rows, "xnumel": columns}:
            return self._over_rows(line, blocks, list(numels), " - c")
        raise CannotRecord(f"one of its kernels iterates over {numels} in {', '.join(blocks)}")

    def _over_elements(self, line: Callable[..., str]) -> list[str]:
        """Return loops over all elements of a chunk: blocks with wide loads, then what is left over."""
        block, small = self._block, THREADS
        wide = line(xnumel="wide - b", XBLOCK=str(block), pointer="tl.multiple_of(base{i} + (offset + b), 16)")
        rest = line(xnumel="elements - b", XBLOCK=str(small), pointer="base{i} + (offset + b)")
        return [
            "wide = tl.where(aligned, elements // 16, 0) * 16",
            f"for b in range(0, wide, {block}):",
            f"    {wide}",
            f"for b in range(wide, elements, {small}):",
            f"    {rest}",
        ]

    def _sum_of_elements(self, line: Callable[..., str]) -> list[str]:
        """Return the lines that sum over all elements of a chunk. The two parts have a slot each."""
        block, small = self._block, THREADS
        wide = {"r0_numel": "wide", "R0_BLOCK": str(block), "pointer": "tl.multiple_of(base{i} + offset, 16)"}
        rest = {"r0_numel": "elements - wide", "R0_BLOCK": str(small), "pointer": "base{i} + (offset + wide)"}
        return [
            "wide = tl.where(aligned, elements // 16, 0) * 16",
            line(xnumel="1", XBLOCK="1", slot="0", **wide),
            line(xnumel="1", XBLOCK="1", slot="1", **rest),
        ]

    def _over_blocks(self, line: Callable[..., str]) -> list[str]:
        """Return loops over all rows of a chunk, which are blocks of a length that is compiled into the kernel."""
        pointer, rows = f"base{{i}} + (offset + b * {BLOCK})", THREADS * 4 // BLOCK
        sizes = {"xnumel": "length - b", "r0_numel": str(BLOCK), "XBLOCK": str(rows), "columns": str(BLOCK), "b": "b"}
        loop = f"    for b in range(0, length, {rows}):"
        wide, plain = line(pointer=f"tl.multiple_of({pointer}, 16)", **sizes), line(pointer=pointer, **sizes)
        return ["if aligned:", loop, f"        {wide}", "else:", loop, f"        {plain}"]

    def _over_rows(
        self, line: Callable[..., str], blocks: Sequence[str], numels: Sequence[str], column: str = ""
    ) -> list[str]:
        """Return loops over all rows of a chunk. ``column`` is given if the kernel has no loop over columns itself.

        Aligned rows are loaded 16 bytes at a time. Other rows have one element for each thread, and short rows are
        processed many at a time.
        """
        pointer = f"base{{i}} + (offset + b * columns_{column.replace('-', '+')})"
        wide = f"if aligned & (columns_ % 16 == 0) & (columns_ > {WIDE}):"
        variants = {
            wide: (self._block // THREADS, THREADS, "(columns_ // 16 * 16)", f"tl.multiple_of({pointer}, 16)"),
            f"elif columns_ > {WIDE}:": (1, THREADS, "columns_", pointer),
            "else:": (THREADS // 8, 8, "columns_", pointer),
        }
        lines = []
        for condition, (rows, width, size, own) in variants.items():
            sizes = dict(zip((*blocks, *numels), (str(rows), str(width), "length - b", size + column), strict=True))
            call = line(b="b", pointer=own, columns=size, **sizes)
            lines += [condition, f"    for b in range(0, length, {rows}):"]
            if column:
                lines += [f"        for c in range(0, {size}, {width}):", f"            {call}"]
            else:
                lines.append(f"        {call}")
        return lines

    def _argument(self, kind: str, argument: Place | Pointer | Extent, changes: Mapping[str, str]) -> str:
        """Return the expression of an argument of a kernel."""
        if isinstance(argument, Extent):
            sizes = {0: "length", 1: changes.get("columns", "columns_")}
            return " * ".join([str(argument.factor), *(sizes[dim] for dim in argument.dims)])
        if isinstance(argument, Pointer):
            number, offset = argument
            index = offset // self._recording.temporaries[number].dtype.itemsize
            if number == self._recording.output:
                index += self._made.first_total(int(self._name.removeprefix(MEASURE)))
                return f"partials + (2 * task + {changes.get('slot', '0')}) * {sum(self._made.sums)} + {index}"
            return f"{self._places[number].format(b=changes.get('b', '0'))} + {index}"
        source, index = argument
        if source in self._row_lists:
            return f"base{source} + (start + {changes.get('b', '0')})"
        if isinstance(source, int):
            return changes["pointer"].format(i=source)
        name = f"carry{index}" if source == CARRY else source
        self._used[name] = None
        start = {
            CARRY: f"first_row + {changes.get('b', '0')}",
            "scalars": f"row * {self._scalars}",
            "inv_scale": "0",
            "grad_scale": "row",
            "totals": f"tensor * {self._made.known + sum(self._made.sums)} + {self._made.first_total(index)}",
        }
        return f"{name} + {start[source]}"

    def _is_of_rows(self, place: Place | Pointer | Extent) -> bool:
        if isinstance(place, Pointer):
            return self._recording.temporaries[place.temporary].extent.dims == (0,)
        return _is_list(place) and place[0] in self._row_lists


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_list(place: Any) -> bool:
    """Return True for the place of a gradient, a parameter or a state."""
    return not isinstance(place, Pointer | Extent) and isinstance(place[0], int)
