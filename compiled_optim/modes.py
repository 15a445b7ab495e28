"""Dispatch modes of torch that are active while an optimizer is used: FakeTensorMode, tracers, users' own modes.

Compiled code does not run through the dispatcher, so a mode does not see it. A step inside a mode that replaces or
records operations therefore runs the eager formula. Other modes, such as a counter of operations, see no operations of
a compiled step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from compiled_optim.torch_private import (
    count_modes,
    current_modes,
    disable_current_modes,
    fake_tensor_types,
    is_tracing_mode,
)


def is_traced() -> bool:
    """Return True inside a FakeTensorMode, and while ``make_fx`` or functionalization records operations."""
    return count_modes() > 0 and any(map(is_tracing_mode, current_modes()))


def is_fake_mode() -> bool:
    """Return True inside a FakeTensorMode, where operations on tensors with memory do not change them."""
    return any(isinstance(mode, fake_tensor_types()) for mode in current_modes())


def outside_of_modes() -> AbstractContextManager[Any]:
    """Return a context without dispatch modes, for tensors and code that belong to this package."""
    return disable_current_modes() if count_modes() else nullcontext()
