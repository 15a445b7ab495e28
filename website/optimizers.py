"""Pages and tables about the optimizers, made from the catalog and from the classes themselves.

Nothing here names an optimizer, so a new one has a page as soon as it is in the catalog.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

import compiled_optim as co
from catalog import ALL, Entry
from compiled_optim import npu
from website.docstrings import to_markdown

ENTRIES = ALL
"""The optimizers that have pages."""

SIDE = 256
"""States are measured on a weight of this many rows and columns."""

STORED: dict[str, tuple[torch.dtype, Mapping[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "float32, bfloat16 states": (torch.float32, {"state_dtype": torch.bfloat16}),
    "float32, 8-bit states": (torch.float32, {"state_dtype": "8bit"}),
}
"""How parameters and states are kept, for the tables of memory: the dtype of the parameter, and options."""


def optimizer_class(entry: Entry) -> type[co.Optimizer]:
    """Return the class of an entry."""
    found: type[co.Optimizer] = getattr(co, entry.name)
    return found


def replaced(entry: Entry) -> list[str]:
    """Return the names of the classes of other packages that the optimizer replaces."""
    ours = optimizer_class(entry)
    names = [f"torch.optim.{entry.name}"] if entry.in_torch else []
    names += [f"torch_npu.optim.{name}" for name in npu.__all__ if getattr(npu, name).__mro__[2] is ours]
    return names if entry.drop_in_for in ("", *names) else [*names, entry.drop_in_for]


_measured: dict[str, dict[str, float] | None] = {}


def states(entry: Entry, dtype: torch.dtype, options: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the bytes that each state takes for an element of a weight, by name; None if the options are refused."""
    key = f"{entry.name}, {dtype}, {written(options)}"
    if key not in _measured:
        _measured[key] = _measure(entry, dtype, options)
    return _measured[key]


def _measure(entry: Entry, dtype: torch.dtype, options: Mapping[str, Any]) -> dict[str, float] | None:
    weight = torch.nn.Parameter(torch.ones(SIDE, SIDE, dtype=dtype))
    try:
        optimizer = optimizer_class(entry)([weight], compile=False, **options)
    except (NotImplementedError, TypeError, ValueError):
        return None
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    tensors = {name: value for name, value in optimizer.state[weight].items() if isinstance(value, torch.Tensor)}
    return {name: each.numel() * each.element_size() / weight.numel() for name, each in tensors.items() if each.ndim}


def total(found: dict[str, float] | None) -> str:
    """Return the sum of the sizes of states, as a cell of a table."""
    return "refused" if found is None else f"{sum(found.values()):.3g}"


def written(options: Mapping[str, Any]) -> str:
    """Return options as they are written in a call."""
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def state_sets(entry: Entry) -> Iterator[tuple[Mapping[str, Any], dict[str, float]]]:
    """Yield the defaults with their states, then the sets of options of the catalog that keep other states."""
    seen = []
    for options in ({}, entry.typical, *entry.parity):
        found = states(entry, torch.float32, options)
        if found is not None and found.keys() not in seen:
            seen.append(found.keys())
            yield options, found


def states_table(entry: Entry) -> str:
    """Return the table of the states of one optimizer."""
    rows = ["| options | states | " + " | ".join(STORED) + " |", "|---|---|" + "--:|" * len(STORED)]
    for options, found in state_sets(entry):
        sizes = [total(states(entry, dtype, {**options, **stored})) for dtype, stored in STORED.values()]
        names = ", ".join(f"`{name}`" for name in found) or "none"
        shown = f"`{written(options)}`" if options else "defaults"
        rows.append(f"| {shown} | {names} | " + " | ".join(sizes) + " |")
    return "\n".join(rows)


def limits(entry: Entry) -> list[str]:
    """Return what the optimizer does not do, read from the class."""
    ours = optimizer_class(entry)
    found = [
        f"Sparse gradients are refused; use `torch.optim.{ours.sparse_alternative.removeprefix('torch.optim.')}`.",
        "`differentiable=True` is refused."
        if entry.in_torch
        else "`capturable` and `differentiable` of torch.optim are not accepted.",
    ]
    if sums_over_tensors(ours):
        found.append(
            "A step sums over each tensor: for sharded parameters this takes an all-reduce, and a pass more on the CPU "
            "and on CUDA. `max_grad_norm_per_parameter` is refused."
        )
    if ours.rowwise:
        found.append("It works by rows, so parameters may be sharded along dimension 0 only.")
    if not ours.counts_steps:
        found.append("It counts no steps, except with `ema_warmup` or stochastic rounding.")
    return found


def sums_over_tensors(ours: type[co.Optimizer]) -> bool:
    """Return True if the rule sums over whole tensors. A class without a rule of its own chooses among several."""
    return hasattr(ours, "update") and "all_reduce" in inspect.signature(ours.update).parameters


PAGE = """\
# {name}

[](){{#compiled_optim.{name}}}

::: compiled_optim.{name}

The options that every optimizer takes are listed [on their own page](../options.md).

## Replaces

{replaced}

Results are compared with {reference} for every option: [numerics](../correctness.md#{slug}) has the differences.

## States

Bytes for each element of a float32 or bfloat16 weight of {side}×{side}, after one step; the last columns are for
`state_dtype=torch.bfloat16` and `state_dtype="8bit"`. The numbers are measured when this page is built (`make docs`).

{states}

## Limits

{limits}
"""


def page(entry: Entry) -> str:
    """Return the page of an optimizer."""
    names = ", ".join(f"`{name}`" for name in replaced(entry))
    return PAGE.format(
        name=entry.name,
        replaced=names or "No class of another package has the same arguments.",
        reference="torch.optim" if entry.in_torch else "the formula in float64",
        slug=slug(entry),
        side=SIDE,
        states=states_table(entry),
        limits="\n".join(f"- {limit}" for limit in limits(entry)),
    )


def advice(entry: Entry) -> str:
    """Return what the docstring says about the use of an optimizer: its text without the formulas and the arguments."""
    text = inspect.cleandoc(optimizer_class(entry).__doc__ or "").split("\nArgs:")[0]
    first, *paragraphs = re.split(r"\n\n+", text.strip())
    prose = [each for each in paragraphs if not each.startswith((".. math::", " ")) and not each.endswith(":")]
    return to_markdown(" ".join(" ".join(prose or [first]).split())).replace("|", "\\|")


def choosing_table(folder: str = "optimizers") -> str:
    """Return the table of all optimizers: when to use them, and what their states take."""
    rows = ["| optimizer | notes | bytes of states a parameter |", "|---|---|--:|"]
    for entry in ENTRIES.values():
        sizes = sorted({total(found) for _, found in state_sets(entry)}, key=float)
        rows.append(f"| [{entry.name}]({folder}/{slug(entry)}.md) | {advice(entry)} | {' or '.join(sizes)} |")
    return "\n".join(rows)


def replaced_table(folder: str = "optimizers") -> str:
    """Return the table of the classes of other packages that optimizers replace."""
    rows = ["| class | is replaced by |", "|---|---|"]
    pairs = [(name, entry) for entry in ENTRIES.values() for name in replaced(entry)]
    for name, entry in sorted(pairs, key=lambda pair: (pair[0].rpartition(".")[0], pair[0])):
        rows.append(f"| `{name}` | [{entry.name}]({folder}/{slug(entry)}.md) |")
    return "\n".join(rows)


def memory_table(folder: str = "optimizers") -> str:
    """Return the table of the bytes that states take, for each optimizer and each way to keep them."""
    rows = ["| optimizer | " + " | ".join(STORED) + " |", "|---|" + "--:|" * len(STORED)]
    for entry in ENTRIES.values():
        sizes = [total(states(entry, dtype, {**entry.typical, **stored})) for dtype, stored in STORED.values()]
        rows.append(f"| [{entry.name}]({folder}/{slug(entry)}.md) | " + " | ".join(sizes) + " |")
    return "\n".join(rows)


def collectives_table() -> str:
    """Return the table of what the ranks exchange for sharded parameters, for each optimizer."""
    exchanged: dict[tuple[str, str], list[str]] = {
        ("nothing", "none"): [],
        ("sums over each tensor, all-reduced", "one for each bucket"): [],
        ("sums over all parameters, all-reduced", "one for each bucket"): [],
        ("means over split dimensions and sums over each tensor, all-reduced", "at most three for each bucket"): [],
        ("whole matrices", "two all-to-alls for each bucket"): [],
    }
    nothing, sums, all_sums, means, matrices = exchanged.values()
    for entry in ENTRIES.values():
        ours = optimizer_class(entry)
        if entry.takes == "matrices":
            matrices.append(entry.name)
        elif ours.matrices:
            means.append(entry.name)
        elif ours.sums_over_all:
            all_sums.append(entry.name)
        else:
            (sums if sums_over_tensors(ours) else nothing).append(entry.name)
    rows = ["| optimizers | exchanged | collectives a step |", "|---|---|---|"]
    rows += [f"| {', '.join(names)} | {what} | {count} |" for (what, count), names in exchanged.items()]
    return "\n".join(rows)


def slug(entry: Entry) -> str:
    """Return the name of the page of an optimizer."""
    return entry.name.lower()
