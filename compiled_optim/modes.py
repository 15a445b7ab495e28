"""Dispatch modes of torch that are active while an optimizer is used: FakeTensorMode, tracers, users' own modes.

Compiled code does not run through the dispatcher, so a mode does not see it. A step inside a mode that replaces or
records operations therefore runs the eager formula. Other modes, such as a counter of operations, see no operations of
a compiled step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


def is_traced() -> bool:
    """Return True inside a FakeTensorMode, and while ``make_fx`` or functionalization records operations."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    modes = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (modes.FAKE, modes.PROXY, modes.FUNCTIONAL))


def is_fake_mode() -> bool:
    """Return True inside a FakeTensorMode, where operations on tensors with memory do not change them."""
    return is_traced() and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def outside_of_modes() -> AbstractContextManager[Any]:
    """Return a context without dispatch modes, for tensors and code that belong to this package."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
