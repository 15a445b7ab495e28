"""Compile the passes of a program over one tensor of any size, and record what the generated functions do.

A program without sums makes one pass over each tensor. Another one makes a pass for each stage of sums, and one more.
The table units of all devices consist of these passes.

Means over the columns of large matrices are stages too: a chunk consists of rows of one matrix, and the driver adds the
sums of its chunks. What all rows of a matrix share, such as the new means, is computed between two passes, once for
each matrix, by a pass over its columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from compiled_optim.backends.base import ArgumentSpec, Signature
from compiled_optim.backends.graph import CARRY, COLUMN_CARRY, SIZES, Place
from compiled_optim.backends.inductor import generated_function, lazy_kernels, lower
from compiled_optim.backends.recording import CannotRecord, Recording, WrapperForm, record
from compiled_optim.backends.tracing import (
    SizeBounds,
    TracedGraph,
    compiled_sizes,
    empty_carry,
    has_whole_blocks,
    is_split,
    trace,
    unit_sum_dtype,
)
from compiled_optim.program import Result
from compiled_optim.program_checks import is_elementwise, split_means, sum_stages
from compiled_optim.stages import SplitMean
from compiled_optim.update_program import Part, Phase, UpdateProgram

MEASURE, COLUMNS, UPDATE = "measure", "columns", "update"
"""The names of the passes: those that measure, and those over columns that follow them, have the number of their stage
behind it. The last one updates."""

UPDATE_PASS = 1
"""The bit of the last pass in the passes of a task."""

CARRIED = 2
"""The largest number of values for each row that are carried from a pass to later ones, and for each column."""

NOT_CUT = "its update() works on whole matrices, so a tensor cannot be cut into chunks"

RECORDED_SIZES = ((7, 11), (5, 13))
"""Sizes for :func:`record`: primes, so that a product tells its factors."""


@dataclass(frozen=True)
class CompiledPasses:
    """The passes of a unit by name, the number of their kernels, and the numbers of sums and carried values.

    ``sums`` has the number of sums of each pass that measures, ``known`` is that of the sums that the unit is given.
    ``means`` has the stages of means and whether these are means of columns, not of whole matrices.
    """

    recordings: Mapping[str, Recording]
    kernels: int
    sums: tuple[int, ...]
    known: int
    carries: int
    column_carries: int
    means: tuple[tuple[int, bool], ...]

    def first_total(self, index: int) -> int:
        """Return the place, among the totals of a tensor, of the argument ``totals`` with this index."""
        return sum(self.sums[:index])


def measure_name(stage: int) -> str:
    """Return the name of the pass that computes the sums of a stage."""
    return f"{MEASURE}{stage}"


def columns_name(stage: int) -> str:
    """Return the name of the pass over columns that follows a stage."""
    return f"{COLUMNS}{stage}"


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
    signature = cut_matrices(signature)
    for name, (part, number) in passes_of(signature).items():
        carried: list[Place] = []
        if number is not None and part.rank == 2:
            sources = (CARRY, COLUMN_CARRY) if is_split(part) else (CARRY,)
            carried = [(source, i) for source in sources for i in range(CARRIED)]
        # for a GPU, Inductor computes a foreach operation again after its input was written: gradients that are
        # unscaled in place would be unscaled twice
        decomposed = part.program.reduces or is_split(part) or not part.device.startswith("cpu")
        traced = trace(part, hint=hint, decompose_foreach=decomposed, carries=carried, bounds=bounds)
        graph_pass = _graph_pass(name, number, part, traced)
        with lazy_kernels(), _refusals(graph_pass):
            settings = {} if graph_pass is None else {"post_grad_custom_post_pass": graph_pass}
            run, count = lower(traced.module, traced.examples, {**options, **settings})
        recording = _record(part, generated_function(run), form, traced.inputs)
        if recording.calls or not name.startswith(COLUMNS):
            recordings[name] = recording
            kernels += count
    sums = () if UPDATE in recordings and len(recordings) == 1 else unit_stages(signature)
    known = sum(spec.shape[0] for spec in signature.arguments if spec.name == "totals")
    carries, column_carries = (count_carries(source, recordings.values()) for source in (CARRY, COLUMN_CARRY))
    means = tuple((stage, len(mean.ones) == 1) for stage, mean in _means(signature).items())
    return CompiledPasses(recordings, kernels, sums, known, carries, column_carries, means)


@contextmanager
def _refusals(graph_pass: Any) -> Iterator[None]:
    """Raise CannotRecord if a graph pass has refused a graph; Inductor turns it into an error of its own."""
    try:
        yield
    except Exception as error:
        if reason := getattr(graph_pass, "refusal", ""):
            raise CannotRecord(reason) from error
        raise


def count_carries(source: str, recordings: Iterable[Recording]) -> int:
    """Return the number of values for each row, or for each column, that passes carry to later ones."""
    places = [argument for recording in recordings for call in recording.calls for argument in call.arguments]
    return max((place[1] + 1 for place in places if place[0] == source), default=0)


def cut_matrices(signature: Signature) -> Signature:
    """Return the signature for chunks of rows, if that of a unit for matrices whose sizes are not compiled in."""
    program = signature.program
    if signature.rank < 3 or compiled_sizes(signature):
        return signature
    if not isinstance(program, UpdateProgram) or (program.phase, program.part) != (Phase.WHOLE, Part.WHOLE):
        raise CannotRecord(NOT_CUT)
    program = replace(program, split=(-2,))
    if not sum_stages(program, 2):
        raise CannotRecord(NOT_CUT)
    program = replace(program, means=split_means(program, 2))
    dtypes = (*signature.dtypes, *(program.dtype for _ in program.means))
    return replace(signature, program=program, rank=2, dtypes=dtypes)


def passes_of(signature: Signature) -> dict[str, tuple[Signature, int | None]]:
    """Return for each pass the signature to trace, and its number if the graph has to be split."""
    program = signature.program
    if program.result is not Result.NOTHING:
        return {measure_name(0): (signature, None)}
    if not isinstance(program, UpdateProgram) or program.phase in (Phase.AVERAGE, Phase.FINISH):
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
    passes: dict[str, tuple[Signature, int | None]] = {name: (staged, number) for number, name in enumerate(names)}
    if is_split(signature):
        passes |= {columns_name(stage): (staged, stage) for stage in range(len(stages))}
    return passes


def _means(signature: Signature) -> dict[int, SplitMean]:
    """Return the means over the rows of matrices by their stages: these have no sums over tensors."""
    if not is_split(signature):
        return {}
    assert isinstance(signature.program, UpdateProgram)
    stages = [stage for stage, sums in enumerate(unit_stages(signature)) if not sums]
    return dict(zip(stages, signature.program.means, strict=True))


def unit_stages(signature: Signature) -> tuple[int, ...]:
    """Return the number of sums over each tensor in each stage that a unit computes itself."""
    program = signature.program
    if not isinstance(program, UpdateProgram):
        return (1,) if program.result is Result.SUM else ()
    stages = sum_stages(program, signature.rank) if program.reduces or is_split(signature) else ()
    return stages[program.stage : program.stage + 1] if program.phase is Phase.MEASURE else stages


def _graph_pass(name: str, number: int | None, signature: Signature, traced: TracedGraph) -> Any:
    """Return the graph pass to apply, or None: that of ``stage_passes`` with a number. This imports Inductor."""
    if number is None:
        if not signature.program.has_blocks or has_whole_blocks(signature):
            return None
        from compiled_optim.backends.block_pass import KeepBlocks

        return KeepBlocks()
    from compiled_optim.backends.stage_passes import StagePass

    stages = sum(spec.name == "totals" for spec in signature.arguments)
    totals: list[Place] = [("totals", stage) for stage in range(stages)]
    first_mean = len(signature.dtypes) - len(means := _means(signature))
    for i, stage in enumerate(means):
        totals[stage] = (first_mean + i, 0)
    if any(total not in traced.inputs for total in totals):
        raise CannotRecord("its update() does not use the result of all_reduce() or mean_over()")
    carries = [i for i, (source, _) in enumerate(traced.inputs) if source in (CARRY, COLUMN_CARRY)]
    return StagePass(number, [traced.inputs.index(total) for total in totals], carries, name.startswith(COLUMNS))


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
            elif source in (CARRY, COLUMN_CARRY):
                inputs.append(empty_carry(signature, (source, index), own, "cpu"))
            elif isinstance(source, int):
                shape = signature.program.list_shape(source, own)
                inputs.append(torch.empty(shape, dtype=signature.dtypes[source], device="cpu"))
            else:
                spec = [spec for spec in signature.arguments if spec.name == source][index]
                inputs.append(torch.empty(spec.shape, dtype=spec.dtype, device="cpu"))
        examples.append((own if has_whole_blocks(signature) else known, inputs))
    return record(run, form, places, (examples[0], examples[1]))
