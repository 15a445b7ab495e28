"""Backends split a batch of tensors into calls and compile each call. Each kind of device has its own file."""

from compiled_optim.backends.base import (
    ArgumentSpec,
    Availability,
    Backend,
    Batch,
    BoundArguments,
    BoundBatch,
    BoundCall,
    Call,
    Lane,
    Layout,
    ScalarRows,
    Signature,
    Unit,
    UnitCall,
)
from compiled_optim.backends.lanes import LaneBackend
from compiled_optim.backends.registry import for_device, get, names, register
from compiled_optim.backends.whole_lists import WholeListBackend

__all__ = [
    "ArgumentSpec",
    "Availability",
    "Backend",
    "Batch",
    "BoundArguments",
    "BoundBatch",
    "BoundCall",
    "Call",
    "Lane",
    "LaneBackend",
    "Layout",
    "ScalarRows",
    "Signature",
    "Unit",
    "UnitCall",
    "WholeListBackend",
    "for_device",
    "get",
    "names",
    "register",
]
