"""Backends: how a batch of tensors is cut into calls and how a call is compiled, one file for each kind of device."""

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
    Scalars,
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
    "Scalars",
    "Signature",
    "Unit",
    "UnitCall",
    "WholeListBackend",
    "for_device",
    "get",
    "names",
    "register",
]
