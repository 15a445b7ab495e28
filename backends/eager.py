"""The eager backend: runs the programs that the other backends compile, for debugging and as a reference."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from compiled_optim.backends.base import Availability, BoundArguments, Call, Lane, Shape, Signature, Unit
from compiled_optim.backends.lanes import LaneBackend
from compiled_optim.program import Arguments, Program, TensorLists
from compiled_optim.program_checks import sum_stages
from compiled_optim.tensors import MAX_PIECE
from compiled_optim.update_program import Part, Phase, UpdateProgram

EAGER_VARIABLE = "COMPILED_OPTIM_EAGER"

MAX_WHOLE = 1 << 23
"""A tensor up to this size is not split if the rule sums over it: stages cost more than large temporaries."""


def eager_requested() -> bool:
    """Return True if the environment variable ``COMPILED_OPTIM_EAGER`` is set."""
    return os.environ.get(EAGER_VARIABLE, "0") not in ("", "0")


class Piece(NamedTuple):
    """A part of a list of tensors: the indices of tensors, and a slice of each or None for all its elements."""

    indices: list[int]
    elements: list[slice | None]

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return this part of a list of tensors."""
        parts = zip(self.indices, self.elements, strict=True)
        return [tensors[i] if elements is None else tensors[i][elements] for i, elements in parts]


class EagerUnit(Unit):
    """A program that runs without compilation, with hyperparameters as Python numbers."""

    graphs = 0

    def __init__(self, program: Program) -> None:
        self._program = program

    def bind(self, shapes: Sequence[Shape], lists: TensorLists, arguments: BoundArguments) -> Call:
        """Return a call that runs the program on the bound tensors and new gradients."""
        program = self._program
        scalars, _, grad_scale, *_ = arguments
        constant = Arguments(**arguments._replace(scalars=None)._asdict())

        def values() -> Arguments:
            scale = None if grad_scale is None else grad_scale[0]
            return constant._replace(scalars=None if scalars is None else scalars.values[0], grad_scale=scale)

        whole = Phase.WHOLE, Part.WHOLE
        if isinstance(program, UpdateProgram) and (program.phase, program.part) == whole and _is_on_cpu(lists):
            return _bind_pieces(program, shapes, lists, values)
        return lambda grads: program([list(grads), *lists], values())


def _is_on_cpu(lists: TensorLists) -> bool:
    return lists[0][0].device.type == "cpu"


def _bind_pieces(
    program: UpdateProgram, shapes: Sequence[Shape], lists: TensorLists, values: Callable[[], Arguments]
) -> Call:
    """Return a call that runs an update piece by piece; sums over a split tensor are computed first."""
    pieces = cut_to_cache(shapes, _largest_whole(program))
    bound = [(piece, [piece.of(tensors) for tensors in lists]) for piece in pieces]
    cut = [(piece, part) for piece, part in bound if piece.elements[0] is not None]
    # only if a tensor is split: counting runs the rule once, and a debugger would stop there
    stages = sum_stages(program, 1) if cut and program.reduces else ()
    measures = [replace(program, phase=Phase.MEASURE, stage=stage) for stage in range(len(stages))]
    finish = replace(program, phase=Phase.FINISH)

    def call(grads: Sequence[Tensor]) -> None:
        arguments = values()
        totals: dict[int, tuple[Tensor, ...]] = {}
        for measure in measures:
            measured: dict[int, Tensor] = {}
            for piece, part in cut:
                (i,) = piece.indices
                sums = measure([piece.of(grads), *part], arguments._replace(totals=totals.get(i)))
                assert sums is not None
                measured[i] = measured[i] + sums if i in measured else sums
            totals = {i: (*totals.get(i, ()), sums) for i, sums in measured.items()}
        for piece, part in bound:
            if piece.indices[0] in totals:
                known = arguments._replace(totals=totals[piece.indices[0]])
                finish([piece.of(grads), *part], known)
            else:
                program([piece.of(grads), *part], arguments)

    return call


def _largest_whole(program: UpdateProgram) -> float:
    """Return the number of elements from which a tensor is split."""
    if not program.is_separable or program.row_lists:
        return math.inf
    return MAX_WHOLE if program.reduces else MAX_PIECE


def cut_to_cache(shapes: Sequence[Shape], max_whole: float) -> list[Piece]:
    """Split a list of tensors into pieces whose temporaries fit into the CPU cache.

    1-D tensors of more than ``max_whole`` elements are split too. Each part of a tensor is a separate piece.
    """
    pieces: list[Piece] = []
    room = 0
    for i, shape in enumerate(shapes):
        size = math.prod(shape)
        cuts: list[slice | None] = [None]
        if size > max_whole and len(shape) == 1:
            cuts = [slice(start, start + MAX_PIECE) for start in range(0, size, MAX_PIECE)]
        for cut in cuts:
            if not pieces or size > room:
                pieces.append(Piece([], []))
                room = MAX_PIECE
            pieces[-1].indices.append(i)
            pieces[-1].elements.append(cut)
            room -= size
    return pieces


class EagerBackend(LaneBackend):
    """Works on every device and compiles nothing; used only with ``compile=False``."""

    name = "eager"
    compiles = False
    layouts = ("tensors", "flat")
    refused_storages: tuple[str, ...] = ()

    def available(self) -> Availability:
        """Return an Availability that is always true."""
        return Availability(True)

    def cut(self, shapes: Sequence[Shape]) -> list[tuple[Lane, list[int]]]:
        """Put all tensors into one call."""
        return [(Lane("list"), list(range(len(shapes))))]

    def compile(self, signature: Signature) -> Unit:
        """Wrap the program."""
        return EagerUnit(signature.program)
