"""Locate code in the user's files, for error messages that name the line of a rule."""

from __future__ import annotations

import dis
import inspect
import linecache
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

PACKAGE = __name__.partition(".")[0]
LIBRARY_FOLDERS = tuple(str(Path(file).parent) for file in (__file__, torch.__file__))


def is_ours(thing: Any) -> bool:
    """Return True if a class or function is defined in this package."""
    return str(thing.__module__).partition(".")[0] == PACKAGE


def definition(function: Callable[..., Any]) -> str:
    """Return where a function is defined."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return location(code.co_filename, code.co_firstlineno, code.co_name) if code is not None else repr(function)


def innermost_user_frame(stack: Sequence[traceback.FrameSummary]) -> str | None:
    """Return the deepest frame that is neither torch's nor this package's."""
    users = [frame for frame in stack if not frame.filename.startswith(LIBRARY_FOLDERS)]
    return location(users[-1].filename, users[-1].lineno or 0, users[-1].name) if users else None


def current_user_line() -> str | None:
    """Return the line of user code that is running now."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARY_FOLDERS):
        frame = frame.f_back
    return location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame is not None else None


def rebinding(function: Callable[..., Any], name: str) -> str | None:
    """Return the first line of a function that assigns to this local name, or None."""
    code = inspect.unwrap(function).__code__
    for instruction in dis.get_instructions(code):
        line = instruction.positions.lineno if instruction.positions is not None else None
        if instruction.opname == "STORE_FAST" and instruction.argval == name and line is not None:
            return location(code.co_filename, line, code.co_name)
    return None


def location(file: str, line: int, function: str) -> str:
    """Format a place in a file, with its source line if it can be read."""
    source = linecache.getline(file, line).strip()
    return f"{file}:{line}, in {function}" + (f": {source}" if source else "")
