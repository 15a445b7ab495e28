"""Backends: how a step's lists are cut into calls and how a call is compiled, one file for each kind of device."""

from compiled_optim.backends.base import Availability, Backend, Call, Lane, Signature, Unit
from compiled_optim.backends.registry import for_device, get, names, register
from compiled_optim.backends.whole_lists import WholeListBackend

__all__ = [
    "Availability",
    "Backend",
    "Call",
    "Lane",
    "Signature",
    "Unit",
    "WholeListBackend",
    "for_device",
    "get",
    "names",
    "register",
]
