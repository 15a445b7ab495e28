"""Compile a program into a table unit: trace it, lower it with Inductor, and build its kernels with the driver."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from compiled_optim.backends import disk_cache, libraries
from compiled_optim.backends.base import ArgumentSpec, BoundArguments, ScalarRows, Shape, Signature
from compiled_optim.backends.graph import CARRY, SIZES, Place
from compiled_optim.backends.inductor import CPU_OPTIONS, lazy_kernels, lower
from compiled_optim.backends.recording import CannotRecord, Recording, record
from compiled_optim.backends.table import MEASURE_PASS, UPDATE_PASS, TableUnit
from compiled_optim.backends.table_source import MEASURE, UPDATE, count_carries, write_source
from compiled_optim.backends.tracing import TracedGraph, trace
from compiled_optim.backends.verification import is_close
from compiled_optim.program import Arguments, Phase, Result, TensorLists, UpdateProgram, count_sums, is_elementwise

OPTIONS: dict[str, Any] = {
    **CPU_OPTIONS,
    "cpp.threads": 1,  # the driver starts the threads
    # let a later loop compute values again instead of storing a temporary
    **dict.fromkeys(("realize_reads_threshold", "realize_acc_reads_threshold", "realize_opcount_threshold"), 1000),
}
HINT = 1 << 14
"""The number of elements in a chunk that Inductor should optimise for."""

CARRIES = 2
"""The largest number of values for each row that are carried from the first pass to the second."""

PASSES = {MEASURE: MEASURE_PASS, UPDATE: UPDATE_PASS}
RECORDED_SIZES = ((7, 11), (5, 13))
"""Sizes for :func:`record`: primes, so that a product tells its factors."""

VERIFIED_SIZES = (37, 1, 64, 3, 90, 0)
VERIFIED_CHUNK = 16
"""Elements in a chunk during verification; small, so that small tensors consist of several chunks."""


def load_table(signature: Signature) -> TableUnit | None:
    """Return the unit of a signature from disk, or None if it has to be compiled."""
    found = disk_cache.load(signature, OPTIONS)
    if found is None:
        return None
    library, about = found
    try:
        unit = _unit(libraries.load(library), about)
    except (ImportError, KeyError, TypeError):
        return None
    unit.from_disk = True
    return unit if table_agrees(signature, unit) else None


def compile_table(signature: Signature) -> TableUnit:
    """Compile the unit of a signature, and save it on disk; raise CannotRecord if its code does not fit the driver."""
    graphs = passes_of(signature)
    recordings, kernels = {}, 0
    for name, (part, graph_pass) in graphs.items():
        carried = CARRIES if graph_pass and part.rank > 1 else 0
        traced = trace(part, hint=HINT, decompose_foreach=part.program.reduces, carries=carried)
        options = {**OPTIONS, **libraries.cache_options(), **_graph_pass(graph_pass, traced)}
        with lazy_kernels():
            run, count = lower(traced.module, traced.examples, options)
        recordings[name] = _record(part, run, traced.inputs)
        kernels += count
    sums = count_unit_sums(signature)
    scalars = sum(math.prod(spec.shape) for spec in signature.arguments if spec.name == "scalars")
    dtype = next((spec.dtype for spec in signature.arguments if spec.name == "scalars"), torch.float32)
    carries = count_carries(recordings.values())
    source = write_source(recordings, len(signature.dtypes), carries, scalars, sums, dtype)
    library, module = libraries.build_and_load(source)
    passes = sum(PASSES[name] for name in graphs)
    about = {"sums": sums, "passes": passes, "carries": carries, "kernels": kernels}
    unit = _unit(module, about)
    if not table_agrees(signature, unit):
        raise CannotRecord("its results differ from those of the eager program")
    if libraries.has_vectors():
        disk_cache.save(signature, OPTIONS, library, about)
    return unit


def _unit(module: Any, about: Mapping[str, int]) -> TableUnit:
    unit = TableUnit(module, about["sums"], about["passes"], about["carries"])
    unit.kernels = about["kernels"]
    return unit


def passes_of(signature: Signature) -> dict[str, tuple[Signature, str]]:
    """Return, for each pass, the signature to trace and the name of the graph pass to apply (empty for none)."""
    program = signature.program
    if program.result is not Result.NOTHING:
        return {MEASURE: (signature, "")}
    if not isinstance(program, UpdateProgram) or program.phase is Phase.FINISH:
        return {UPDATE: (signature, "")}
    sums = count_unit_sums(signature)
    if not sums:
        if not (program.is_separable or is_elementwise(program, signature.rank)):
            raise CannotRecord("its update() combines elements of a tensor, so a tensor cannot be cut into chunks")
        return {UPDATE: (signature, "")}
    totals = ArgumentSpec("totals", torch.float64, (sums,))
    both = replace(signature, program=replace(program, phase=Phase.BOTH), arguments=(*signature.arguments, totals))
    return {MEASURE: (both, "FirstPass"), UPDATE: (both, "SecondPass")}


def count_unit_sums(signature: Signature) -> int:
    """Return the number of sums over each tensor that the unit computes or gets."""
    program = signature.program
    if not isinstance(program, UpdateProgram):
        return 1 if program.result is Result.SUM else 0
    return count_sums(program, signature.rank) if program.reduces else 0


def _graph_pass(name: str, traced: TracedGraph) -> dict[str, Any]:
    """Return the setting that applies a graph pass of ``two_passes``. Importing it imports Inductor."""
    if not name:
        return {}
    from compiled_optim.backends import two_passes

    if ("totals", 0) not in traced.inputs:
        raise CannotRecord("its update() does not use the result of all_reduce()")
    carries = [i for i, (source, _) in enumerate(traced.inputs) if source == CARRY]
    made = getattr(two_passes, name)(traced.inputs.index(("totals", 0)), carries)
    return {"post_grad_custom_post_pass": made}


def _record(signature: Signature, run: Any, places: Sequence[Place]) -> Recording:
    examples = []
    for sizes in RECORDED_SIZES:
        own = sizes[: signature.rank]
        inputs: list[Any] = []
        for source, index in places:
            if source == SIZES:
                inputs.append(own[index])
            elif source == CARRY:
                inputs.append(torch.empty(own[0], dtype=torch.float64, device="cpu"))
            elif isinstance(source, int):
                inputs.append(torch.empty(own, dtype=signature.dtypes[source], device="cpu"))
            else:
                (spec,) = (spec for spec in signature.arguments if spec.name == source)
                inputs.append(torch.empty(spec.shape, dtype=spec.dtype, device="cpu"))
        examples.append((own, inputs))
    return record(run, places, (examples[0], examples[1]))


def table_agrees(signature: Signature, unit: TableUnit) -> bool:
    """Return True if a unit agrees with the eager program on tensors of several sizes, with two rows of scalars.

    One tensor has no gradient, and must not change. The gradients are passed in other shapes than the parameters,
    because a unit uses only their addresses.
    """
    shapes: list[Shape] = [(size,) if signature.rank == 1 else (size, 5) for size in VERIFIED_SIZES]
    skipped = 2
    arguments = _example_arguments(signature, len(shapes))
    lists, expected = (_example_lists(signature, shapes) for _ in range(2))
    grads: list[Tensor | None] = [grad.view(1, -1, 1) for grad in lists[0]]
    grads[skipped] = None
    call = unit.bind(shapes, lists[1:], arguments, chunk=VERIFIED_CHUNK)
    result = call(grads)
    pairs = []
    for i in range(len(shapes)):
        own = [[tensors[i]] for tensors in expected]
        row = 0 if arguments.scalars is None else arguments.scalars.row_of[i]
        known = arguments.of_row(row)
        if arguments.totals is not None:
            known["totals"] = arguments.totals[:, i]
        returned = None
        if i != skipped and own[0][0].numel():
            returned = signature.program(own, Arguments(**known))
        pairs += [(tensors[i], kept[0]) for tensors, kept in zip(lists, own, strict=True)]
        if result is not None:
            zeros = torch.zeros_like(result[i])
            pairs.append((result[i], zeros if returned is None else returned.reshape(zeros.shape)))
    return all(is_close(a, b) for a, b in pairs)


def _example_lists(signature: Signature, shapes: Sequence[Shape]) -> TensorLists:
    """Return random values in [0.5, 1.5), the same in every call."""
    generator = torch.Generator().manual_seed(0)
    return [
        [(torch.rand(shape, generator=generator, device="cpu") + 0.5).to(dtype) for shape in shapes]
        for dtype in signature.dtypes
    ]


def _example_arguments(signature: Signature, tensors: int) -> BoundArguments:
    """Return example arguments with two rows of scalars. The tensors have them by turns."""
    generator = torch.Generator().manual_seed(1)
    made: dict[str, Any] = {}
    for name, dtype, shape in signature.arguments:
        values = torch.rand(tensors, max(math.prod(shape), 1), generator=generator, device="cpu").to(dtype) + 0.5
        if name == "scalars":
            rows = made[name] = ScalarRows(shape[0] // 2, tensors, dtype)
            rows.tensor.copy_(values[:, : shape[0]])
            rows.row_of[:] = array("q", [i % 2 for i in range(tensors)])
        else:
            made[name] = values[:, 0] if name == "grad_scale" else values.T
    return BoundArguments(**made)
