"""Raise KeyboardInterrupt at a chosen moment of a step.

Python raises the exception between two bytecodes, and most often after a call of a C function, during which the signal
arrived. So the moments are: before each line of the package, and after each call of a C function from it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import compiled_optim as co
from compiled_optim import backends
from compiled_optim.backends import BoundBatch

ROOTS = tuple(str(Path(package.__file__).parent) for package in (co, backends))

Moment = tuple[str, int, str]
"""A file, a line, and "line" or the name of the C function that has returned."""


@contextmanager
def moments(interrupt: Callable[[int, Moment], bool]) -> Iterator[None]:
    """Call a function at each moment, with its number; raise KeyboardInterrupt once the function returns True."""
    number = -1
    is_armed = True

    def pass_by(frame: FrameType, what: str) -> None:
        nonlocal number, is_armed
        if is_armed and not _is_in_eager_formula(frame):
            number += 1
            if interrupt(number, (frame.f_code.co_filename, frame.f_lineno, what)):
                is_armed = False
                raise KeyboardInterrupt

    def trace_lines(frame: FrameType, event: str, argument: object) -> Callable:
        if event == "line":
            pass_by(frame, "line")
        return trace_lines

    def trace(frame: FrameType, event: str, argument: object) -> Callable | None:
        return trace_lines if frame.f_code.co_filename.startswith(ROOTS) else None

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "c_return" and frame.f_code.co_filename.startswith(ROOTS):
            pass_by(frame, getattr(argument, "__name__", "?"))

    before = sys.gettrace(), sys.getprofile()
    sys.setprofile(profile)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])


def moments_of(step: Callable[[], object]) -> list[Moment]:
    """Make a step; return its moments."""
    found: list[Moment] = []
    with moments(lambda _, moment: bool(found.append(moment))):
        step()
    return found


def _is_in_eager_formula(frame: FrameType | None) -> bool:
    """Return True inside an update by the eager backend, whose operations are interrupted as those of torch.optim.

    A compiled update is one native call.
    """
    while frame is not None and frame.f_code.co_filename.startswith(ROOTS):
        if frame.f_code is BoundBatch.__call__.__code__:
            return True
        frame = frame.f_back
    return False
