"""The eager backend: runs the same program the other backends compile. For debugging and as a reference."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from torch import Tensor

from compiled_optim.backends.base import Availability, BoundArguments, Call, Lane, Shape, Signature, Unit
from compiled_optim.backends.lanes import LaneBackend
from compiled_optim.program import Arguments, Program, TensorLists

EAGER_VARIABLE = "COMPILED_OPTIM_EAGER"


def eager_requested() -> bool:
    """Return True if the environment asks for eager steps in the whole run."""
    return os.environ.get(EAGER_VARIABLE, "0") not in ("", "0")


class EagerUnit(Unit):
    """A program run as it is, with hyperparameters as Python numbers."""

    graphs = 0

    def __init__(self, program: Program) -> None:
        self._program = program

    def bind(self, shapes: Sequence[Shape], lists: TensorLists, arguments: BoundArguments) -> Call:
        """Return the program with everything but the gradients filled in."""
        program, (scalars, grad_scale, totals) = self._program, arguments

        def call(grads: Sequence[Tensor]) -> Tensor | None:
            values = scalars.values if scalars is not None else None
            return program([list(grads), *lists], Arguments(values, grad_scale, totals))

        return call


class EagerBackend(LaneBackend):
    """Works on every device and compiles nothing; used only with ``compile=False``."""

    name = "eager"
    compiles = False

    def available(self) -> Availability:
        """Return True: there is nothing to be missing."""
        return Availability(True)

    def cut(self, shapes: Sequence[Shape]) -> list[tuple[Lane, list[int]]]:
        """Make one call for each run of tensors that is short enough; empty tensors need none."""
        import os

        M = int(os.environ.get("EAGER_MAX", 1 << 17))
        calls: list[tuple[Lane, list[int]]] = []
        room = 0
        for i, size in enumerate(map(math.prod, shapes)):
            if not size:
                continue
            if size > room:
                calls.append((Lane("list"), []))
                room = M
            calls[-1][1].append(i)
            room -= size
        return calls

    def compile(self, signature: Signature) -> Unit:
        """Wrap the program."""
        return EagerUnit(signature.program)
