"""The correctness matrix: the difference of every optimizer from its reference, by options, dtype and device path.

``python -m catalog.matrix`` measures it and writes docs/correctness.md. Every run is compared with a run of the
reference in float64, from the same values and gradients.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import compiled_optim as co
from catalog.entries import ALL
from catalog.entry import Entry, Options

PAGE = Path(__file__).parents[1] / "docs" / "correctness.md"
SHAPES = [(40, 25), (300,), (6, 5, 3, 3)]
STEPS = 10
SEED = 17
"""With this seed, Lion never takes the sign of a sum that would be zero without rounding."""

COLUMNS = {
    "float64, eager": (torch.float64, False),
    "float32, eager": (torch.float32, False),
    "float32, compiled": (torch.float32, True),
    "bfloat16, eager": (torch.bfloat16, False),
    "bfloat16, compiled": (torch.bfloat16, True),
    "float16, eager": (torch.float16, False),
}
STORAGES: dict[str, tuple[torch.dtype, Mapping[str, Any]]] = {
    "bfloat16": (torch.bfloat16, {}),
    "stochastic": (torch.bfloat16, {"rounding": "stochastic"}),
    "kahan": (torch.bfloat16, {"rounding": "kahan"}),
    "master weights": (torch.bfloat16, {"master_weights": True}),
    "float32, bfloat16 states": (torch.float32, {"state_dtype": torch.bfloat16}),
    "float32, 8-bit states": (torch.float32, {"state_dtype": "8bit"}),
}
"""Ways to keep parameters and states: the dtype of the parameters, and the options."""

Make = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


def run(make: Make, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]], start: torch.dtype) -> list[Tensor]:
    """Return parameters after some steps. They start at values that ``start`` can hold; gradients are bfloat16."""
    generator = torch.Generator().manual_seed(SEED)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(start).to(dtype)) for shape in shapes]
    optimizer = make(params)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + 0.1 * step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(torch.bfloat16).to(dtype)
        optimizer.step()
    return [param.detach().double() for param in params]


def difference(
    entry: Entry, options: Options, dtype: torch.dtype, compiled: bool, shapes: Sequence[tuple[int, ...]] = SHAPES,
    stored: Options | None = None,
) -> float | None:  # fmt: skip
    """Return the largest relative difference from the reference by norm; None if the options are refused."""

    def ours(params: Sequence[Tensor]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(co, entry.name)(
            params, **options, **(stored or {}), compile=compiled
        )
        return optimizer

    def theirs(params: Sequence[Tensor]) -> torch.optim.Optimizer:
        return entry.reference(params, **options)

    try:
        actual = run(ours, dtype, shapes, dtype)
    except (NotImplementedError, ValueError):
        return None
    expected = run(theirs, torch.float64, shapes, dtype)
    pairs = zip(actual, expected, strict=True)
    return max(float((mine - other).norm() / other.norm()) for mine, other in pairs)


def shapes_of(entry: Entry) -> Sequence[tuple[int, ...]]:
    """Return the shapes of the parameters that an optimizer is compared on."""
    return [shape for shape in SHAPES if len(shape) == 2] if entry.takes == "matrices" else SHAPES


def option_sets(entry: Entry) -> list[Options]:
    """Return the sets of options of an entry, the typical one first. Those without it are compared eagerly only."""
    return [entry.typical, *(options for options in entry.parity if options != entry.typical)]


def rows(entry: Entry) -> Iterator[tuple[Options, list[str]]]:
    """Yield each set of options of an optimizer with its differences."""
    for options in option_sets(entry):
        cells = []
        for dtype, compiled in COLUMNS.values():
            usual = {**options, **entry.float16} if dtype == torch.float16 else options
            skipped = compiled and options != entry.typical
            cells.append("" if skipped else written(difference(entry, usual, dtype, compiled, shapes_of(entry))))
        yield options, cells


def written(value: float | None) -> str:
    """Return a difference as a cell of a table."""
    return "refused" if value is None else f"{value:.0e}"


def storage_row(entry: Entry) -> list[str]:
    """Return the differences of an optimizer with each way to keep parameters and states."""
    shapes = [(80, 100)]  # 8-bit states start at 4,096 elements
    return [
        written(difference(entry, entry.typical, dtype, compiled=False, shapes=shapes, stored=stored))
        for dtype, stored in STORAGES.values()
    ]


def reference_name(entry: Entry) -> str:
    """Return the name of the reference, for people."""
    if entry.in_torch:
        return f"`torch.optim.{entry.name}`"
    formula = entry.reference.keywords["formula"].__name__  # type: ignore[union-attr] # a partial of Formula
    return f"`catalog.references.{formula}`, the formula in float64 NumPy"


def call(options: Options) -> str:
    """Return options as they are written in a call."""
    return f"`{', '.join(f'{name}={value!r}' for name, value in options.items())}`" if options else "defaults"


INTRODUCTION = """\
# Correctness matrix

This page is written by `python -m catalog.matrix`. Do not edit it.

Each cell is a relative difference, ‖ours − reference‖ / ‖reference‖: the largest over tensors of shapes
{shapes}, after {steps} steps with changing gradients and a changing learning rate. The reference always
computes in float64, from the same initial values and gradients. So a column shows the rounding of its dtype: a float32
step rounds to 6e-8 of a value, a float16 step to 5e-4, a bfloat16 step to 4e-3.

- **Options**: those of the catalog, which cover every branch of a rule. The first row of a table has the options that
  select the largest program; it is compared compiled too. float16 adds the options of the catalog that keep states in
  its range. Where it has none, small second moments are lost in float16 ([numerics](numerics.md)).
- **Device path**: "eager" and "compiled" run on the CPU (`compile=False`, and the backend `cpu`). `pytest
  tests/rules/test_parity.py` compares all options compiled as well, and asserts the tolerances. The paths of CUDA and
  NPUs are interpreted on the CPU by `pytest tests/hardware_free`, which asserts 1e-6 in float32; see
  [accelerators](accelerators.md).

Measured with torch {torch}, {machine}.
"""

STORAGE_INTRODUCTION = """\
## Storage options

The same difference for one tensor of 80×100 and the typical options, eager, by how parameters and states are kept:
bfloat16 parameters rounded to nearest, stochastically, with compensation (`rounding="kahan"`) or with `master_weights`;
float32 parameters with `state_dtype`. "refused" means that the constructor raises.
"""


def page(entries: Mapping[str, Entry]) -> str:
    """Measure the matrix, and return the page."""
    shapes = ", ".join("×".join(map(str, shape)) for shape in SHAPES)
    versions = {"torch": torch.__version__.partition("+")[0], "machine": f"{platform.system()} {platform.machine()}"}
    parts = [INTRODUCTION.format(shapes=shapes, steps=STEPS, **versions), STORAGE_INTRODUCTION]
    parts.append(table(["optimizer", *STORAGES], [[name, *storage_row(entry)] for name, entry in entries.items()]))
    for name, entry in entries.items():
        parts.append(f"\n## {name}\n\nReference: {reference_name(entry)}.\n")
        parts.append(table(["options", *COLUMNS], [[call(options), *cells] for options, cells in rows(entry)]))
    return "\n".join(parts)


def table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, with numbers to the right."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m catalog.matrix", description=__doc__)
    parser.add_argument("--output", type=Path, default=PAGE, help="the file to write")
    output = parser.parse_args().output
    output.write_text(page(ALL))
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
