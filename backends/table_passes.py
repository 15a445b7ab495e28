"""Compile the passes of a program over one tensor of any size, and record what the generated functions do.

A program without sums makes one pass over each tensor, a program with sums two. The table units of all devices consist
of these passes.
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
from compiled_optim.backends.tracing import SizeBounds, TracedGraph, has_whole_blocks, trace, unit_sum_dtype
from compiled_optim.program import Result
from compiled_optim.program_checks import count_sums, is_elementwise
from compiled_optim.quantization import BLOCK
from compiled_optim.update_program import Phase, UpdateProgram

MEASURE, UPDATE = "measure", "update"
"""The names of the passes: the first computes sums, the second updates."""

MEASURE_PASS, UPDATE_PASS = 1, 2
PASSES = {MEASURE: MEASURE_PASS, UPDATE: UPDATE_PASS}

CARRIES = 2
"""The largest number of values for each row that are carried from the first pass to the second."""

RECORDED_SIZES = ((7, 11), (5, 13))
"""Sizes for :func:`record`: primes, so that a product tells its factors."""


@dataclass(frozen=True)
class CompiledPasses:
    """The passes of a unit by name, the number of their kernels, and the numbers of sums and carried values."""

    recordings: Mapping[str, Recording]
    kernels: int
    sums: int
    carries: int

    @property
    def passes(self) -> int:
        """The passes that exist, as a sum of the values of PASSES."""
        return sum(PASSES[name] for name in self.recordings)


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
    for name, (part, graph_pass) in passes_of(signature).items():
        carried = CARRIES if graph_pass and part.rank > 1 else 0
        # for a GPU, Inductor computes a foreach operation again after its input was written: gradients that are
        # unscaled in place would be unscaled twice
        decomposed = part.program.reduces or not part.device.startswith("cpu")
        traced = trace(part, hint=hint, decompose_foreach=decomposed, carries=carried, bounds=bounds)
        with lazy_kernels():
            run, count = lower(traced.module, traced.examples, {**options, **_graph_pass(graph_pass, part, traced)})
        recordings[name] = _record(part, generated_function(run), form, traced.inputs)
        kernels += count
    return CompiledPasses(recordings, kernels, count_unit_sums(signature), count_carries(recordings.values()))


def count_carries(recordings: Iterable[Recording]) -> int:
    """Return the number of values for each row that the first pass carries to the second."""
    places = [argument for recording in recordings for call in recording.calls for argument in call.arguments]
    return max((place[1] + 1 for place in places if place[0] == CARRY), default=0)


def passes_of(signature: Signature) -> dict[str, tuple[Signature, str]]:
    """Return, for each pass, the signature to trace and the name of the graph pass to apply (empty for none)."""
    program = signature.program
    if program.result is not Result.NOTHING:
        return {MEASURE: (signature, "")}
    if not isinstance(program, UpdateProgram) or program.phase is Phase.FINISH:
        return {UPDATE: (signature, "")}
    sums = count_unit_sums(signature)
    if signature.rank > 2:
        raise CannotRecord("its update() works on whole matrices, so a tensor cannot be cut into chunks")
    if not sums:
        if not (program.is_separable or is_elementwise(program, signature.rank)):
            raise CannotRecord("its update() combines elements of a tensor, so a tensor cannot be cut into chunks")
        return {UPDATE: (signature, "")}
    totals = ArgumentSpec("totals", unit_sum_dtype(signature), (sums,))
    both = replace(signature, program=replace(program, phase=Phase.BOTH), arguments=(*signature.arguments, totals))
    return {MEASURE: (both, "FirstPass"), UPDATE: (both, "SecondPass")}


def count_unit_sums(signature: Signature) -> int:
    """Return the number of sums over each tensor that the unit computes or gets."""
    program = signature.program
    if not isinstance(program, UpdateProgram):
        return 1 if program.result is Result.SUM else 0
    return count_sums(program, signature.rank) if program.reduces else 0


def _graph_pass(name: str, signature: Signature, traced: TracedGraph) -> dict[str, Any]:
    """Return the setting that applies a graph pass, of ``two_passes`` if it has a name. This imports Inductor."""
    if not name:
        if not signature.program.has_blocks or has_whole_blocks(signature):
            return {}
        from compiled_optim.backends.block_pass import KeepBlocks

        return {"post_grad_custom_post_pass": KeepBlocks()}
    from compiled_optim.backends import two_passes

    if ("totals", 0) not in traced.inputs:
        raise CannotRecord("its update() does not use the result of all_reduce()")
    carries = [i for i, (source, _) in enumerate(traced.inputs) if source == CARRY]
    made = getattr(two_passes, name)(traced.inputs.index(("totals", 0)), carries)
    return {"post_grad_custom_post_pass": made}


def _record(signature: Signature, run: Any, form: WrapperForm, places: Sequence[Place]) -> Recording:
    examples = []
    for sizes in RECORDED_SIZES:
        own = (sizes[0], BLOCK) if has_whole_blocks(signature) else sizes[: signature.rank]
        inputs: list[Any] = []
        for source, index in places:
            if source == SIZES:
                inputs.append(own[index])
            elif source == CARRY:
                inputs.append(torch.empty(own[0], dtype=unit_sum_dtype(signature), device="cpu"))
            elif isinstance(source, int):
                sizes_of = own[:1] if source in signature.program.row_lists else own
                inputs.append(torch.empty(sizes_of, dtype=signature.dtypes[source], device="cpu"))
            else:
                (spec,) = (spec for spec in signature.arguments if spec.name == source)
                inputs.append(torch.empty(spec.shape, dtype=spec.dtype, device="cpu"))
        examples.append((own, inputs))
    return record(run, form, places, (examples[0], examples[1]))
