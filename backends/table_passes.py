"""Compile the passes of a program over one tensor of any size, and record what the generated functions do.

A program without sums makes one pass over each tensor. Another one makes a pass for each stage of sums, and one more.
The table units of all devices consist of these passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from compiled_optim.backends.base import ArgumentSpec, Signature
from compiled_optim.backends.graph import CARRY, SIZES, Place
from compiled_optim.backends.inductor import generated_function, lazy_kernels, lower
from compiled_optim.backends.recording import CannotRecord, Recording, WrapperForm, record
from compiled_optim.backends.tracing import (
    SizeBounds,
    TracedGraph,
    compiled_sizes,
    has_whole_blocks,
    trace,
    unit_sum_dtype,
)
from compiled_optim.program import Result
from compiled_optim.program_checks import is_elementwise, sum_stages
from compiled_optim.update_program import Phase, UpdateProgram

MEASURE, UPDATE = "measure", "update"
"""The names of the passes: those that measure have the number of their stage behind it, the last one updates."""

UPDATE_PASS = 1
"""The bit of the last pass in the passes of a task."""

CARRIES = 2
"""The largest number of values for each row that are carried from a pass to later ones."""

RECORDED_SIZES = ((7, 11), (5, 13))
"""Sizes for :func:`record`: primes, so that a product tells its factors."""


@dataclass(frozen=True)
class CompiledPasses:
    """The passes of a unit by name, the number of their kernels, and the numbers of sums and carried values.

    ``sums`` has the number of sums of each pass that measures, ``known`` is that of the sums that the unit is given.
    """

    recordings: Mapping[str, Recording]
    kernels: int
    sums: tuple[int, ...]
    known: int
    carries: int

    def first_total(self, index: int) -> int:
        """Return the place, among the totals of a tensor, of the argument ``totals`` with this index."""
        return sum(self.sums[:index])


def measure_name(stage: int) -> str:
    """Return the name of the pass that computes the sums of a stage."""
    return f"{MEASURE}{stage}"


def measure_pass(stage: int) -> int:
    """Return the bit of the pass that computes the sums of a stage, in the passes of a task."""
    return 2 << stage


def compile_passes(
    signature: Signature,
    form: WrapperForm,
    options: Mapping[str, Any],
    hint: int,
    bounds: SizeBounds = SizeBounds(),  # noqa: B008
) -> CompiledPasses:
    """Compile the passes of a signature with Inductor; raise CannotRecord if they do not fit a table.

    Args:
        signature: what to compile.
        form: the form of the functions that Inductor generates for the device.
        options: the settings of Inductor.
        hint: the number of elements in a chunk that Inductor should optimise for.
        bounds: the smallest and the largest size of a dimension of a chunk.
    """
    recordings, kernels = {}, 0
    # drivers skip a step themselves
    signature = replace(signature, arguments=tuple(spec for spec in signature.arguments if spec.name != "found_inf"))
    for name, (part, number) in passes_of(signature).items():
        carried = CARRIES if number is not None and part.rank > 1 else 0
        # for a GPU, Inductor computes a foreach operation again after its input was written: gradients that are
        # unscaled in place would be unscaled twice
        decomposed = part.program.reduces or not part.device.startswith("cpu")
        traced = trace(part, hint=hint, decompose_foreach=decomposed, carries=carried, bounds=bounds)
        with lazy_kernels():
            run, count = lower(traced.module, traced.examples, {**options, **_graph_pass(number, part, traced)})
        recordings[name] = _record(part, generated_function(run), form, traced.inputs)
        kernels += count
    sums = () if UPDATE in recordings and len(recordings) == 1 else unit_stages(signature)
    known = sum(spec.shape[0] for spec in signature.arguments if spec.name == "totals")
    return CompiledPasses(recordings, kernels, sums, known, count_carries(recordings.values()))


def count_carries(recordings: Iterable[Recording]) -> int:
    """Return the number of values for each row that passes carry to later ones."""
    places = [argument for recording in recordings for call in recording.calls for argument in call.arguments]
    return max((place[1] + 1 for place in places if place[0] == CARRY), default=0)


def passes_of(signature: Signature) -> dict[str, tuple[Signature, int | None]]:
    """Return for each pass the signature to trace, and its number if the graph has to be split."""
    program = signature.program
    if signature.rank > 2 and not compiled_sizes(signature):
        raise CannotRecord("its update() works on whole matrices, so a tensor cannot be cut into chunks")
    if program.result is not Result.NOTHING:
        return {measure_name(0): (signature, None)}
    if not isinstance(program, UpdateProgram) or program.phase is Phase.FINISH:
        return {UPDATE: (signature, None)}
    stages = unit_stages(signature)
    if not stages:
        if not (program.is_separable or is_elementwise(program, signature.rank)):
            raise CannotRecord("its update() combines elements of a tensor, so a tensor cannot be cut into chunks")
        return {UPDATE: (signature, None)}
    totals = [ArgumentSpec("totals", unit_sum_dtype(signature), (count,)) for count in stages]
    program, arguments = replace(program, phase=Phase.STAGED), (*signature.arguments, *totals)
    staged = replace(signature, program=program, arguments=arguments)
    names = [*map(measure_name, range(len(stages))), UPDATE]
    return {name: (staged, number) for number, name in enumerate(names)}


def unit_stages(signature: Signature) -> tuple[int, ...]:
    """Return the number of sums over each tensor in each stage that a unit computes itself."""
    program = signature.program
    if not isinstance(program, UpdateProgram):
        return (1,) if program.result is Result.SUM else ()
    stages = sum_stages(program, signature.rank) if program.reduces else ()
    return stages[program.stage : program.stage + 1] if program.phase is Phase.MEASURE else stages


def _graph_pass(number: int | None, signature: Signature, traced: TracedGraph) -> dict[str, Any]:
    """Return the setting that applies a graph pass: that of ``stage_passes`` with a number. This imports Inductor."""
    if number is None:
        if not signature.program.has_blocks or has_whole_blocks(signature):
            return {}
        from compiled_optim.backends.block_pass import KeepBlocks

        return {"post_grad_custom_post_pass": KeepBlocks()}
    from compiled_optim.backends.stage_passes import StagePass

    stages = sum(spec.name == "totals" for spec in signature.arguments)
    if any(("totals", stage) not in traced.inputs for stage in range(stages)):
        raise CannotRecord("its update() does not use the result of all_reduce()")
    carries = [i for i, (source, _) in enumerate(traced.inputs) if source == CARRY]
    made = StagePass(number, [traced.inputs.index(("totals", stage)) for stage in range(stages)], carries)
    return {"post_grad_custom_post_pass": made}


def _record(signature: Signature, run: Any, form: WrapperForm, places: Sequence[Place]) -> Recording:
    examples = []
    compiled = compiled_sizes(signature)
    for sizes in RECORDED_SIZES:
        known = sizes[: signature.rank - len(compiled)]
        own = (*known, *compiled)
        inputs: list[Any] = []
        for source, index in places:
            if source == SIZES:
                inputs.append(own[index])
            elif source == CARRY:
                inputs.append(torch.empty(own[0], dtype=unit_sum_dtype(signature), device="cpu"))
            elif isinstance(source, int):
                shape = signature.program.list_shape(source, own)
                inputs.append(torch.empty(shape, dtype=signature.dtypes[source], device="cpu"))
            else:
                spec = [spec for spec in signature.arguments if spec.name == source][index]
                inputs.append(torch.empty(spec.shape, dtype=spec.dtype, device="cpu"))
        examples.append((own if has_whole_blocks(signature) else known, inputs))
    return record(run, form, places, (examples[0], examples[1]))
