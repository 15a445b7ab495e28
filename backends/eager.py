"""The eager backend: runs the very program the others compile, on whole lists. For debugging and as a reference."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from torch import Tensor

from compiled_optim.backends.base import Availability, Backend, Call, Lane, Signature, Unit
from compiled_optim.program import Program, TensorLists

EAGER_VARIABLE = "COMPILED_OPTIM_EAGER"


def asked_for_eager() -> bool:
    """Whether the environment asks for eager steps in the whole run."""
    return os.environ.get(EAGER_VARIABLE, "0") not in ("", "0")


class EagerUnit(Unit):
    """A program run as it stands."""

    graphs = 0

    def __init__(self, program: Program) -> None:
        self._program = program

    def bind(self, shapes: Sequence[tuple[int, ...]], lists: TensorLists, shared: Sequence[Tensor]) -> Call:
        """Return the program with everything but the gradients filled in."""
        return lambda grads: self._program([list(grads), *lists], shared)


class EagerBackend(Backend):
    """Works on every device and compiles nothing; chosen by ``compile=False``, never in silence."""

    name = "eager"
    compiles = False

    def available(self) -> Availability:
        """Always."""
        return Availability(True)

    def cut(self, shapes: Sequence[tuple[int, ...]]) -> list[tuple[Lane, list[int]]]:
        """One call for the whole list; empty tensors need none."""
        places = [i for i, shape in enumerate(shapes) if math.prod(shape)]
        return [(Lane("list"), places)] if places else []

    def compile(self, signature: Signature) -> Unit:
        """Wrap the program."""
        return EagerUnit(signature.program)
