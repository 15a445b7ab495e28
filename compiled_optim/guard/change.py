"""Describe how a parameter was reallocated: what changed, the values before and after, and the likely cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_optim.engine.tensor_types import local_shard


class Description(NamedTuple):
    """The metadata of a strided tensor, and the address of its local shard."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Description:
        """Describe a tensor."""
        return cls(local_shard(tensor).data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape} on {self.device}"


@dataclass(frozen=True)
class Change:
    """One parameter that was reallocated.

    ``kind`` is "shape", "device", "dtype", "strides", "storage", "replaced" or "removed". If several of
    shape, device and dtype changed, ``kind`` is the first of them, and ``text`` names them all.
    """

    parameter: str
    kind: str
    before: str
    after: str
    text: str
    cause: str

    def __str__(self) -> str:
        return f"{self.parameter}: {self.text}"

    @property
    def identity(self) -> tuple[str, ...]:
        """The key under which repeated changes are counted as one event. It contains no addresses."""
        return (self.parameter, self.kind) if self.kind == "storage" else (self.parameter, self.kind, self.text)


def compare(name: str, before: Description, after: Description) -> Change | None:
    """Return the change between two descriptions of a parameter, or None if they are equal."""
    kinds = [kind for kind in ("shape", "device", "dtype") if getattr(before, kind) != getattr(after, kind)]
    if not kinds and before.strides != after.strides:
        kinds = ["strides"]
    if kinds:
        values = {kind: (str(getattr(before, kind)), str(getattr(after, kind))) for kind in kinds}
    elif before.address != after.address:
        values = {"storage": (f"{before.address:#x}", f"{after.address:#x}")}
    else:
        return None
    kind, (old, new) = next(iter(values.items()))
    text = " and ".join(f"{kind} changed from {old} to {new}" for kind, (old, new) in values.items())
    return Change(name, kind, old, new, text, _cause(kind, after))


def replacement(name: str, before: Description | None, after: Description | None, tied: str | None = None) -> Change:
    """Return the change of a module attribute that now holds another parameter.

    ``tied`` is the name of the other parameter if the optimizer has it already.
    """
    old = str(before) if before else "None"
    new = str(after) if after else "None"
    if tied is not None:
        text, cause = f"replaced by {tied}, which the optimizer has already", "`module.weight = other.weight`"
    elif before is None:
        text = f"set again, to a new object, {new}, after it had been removed"
        cause = "`module.weight = nn.Parameter(...)`"
    else:
        text = f"replaced by a new object: {old} became {new}"
        cause = "`module.weight = nn.Parameter(...)`, a new submodule, or load_state_dict(assign=True)"
    return Change(name, "replaced", old, tied or new, text, cause)


def removal(name: str, before: Description | None) -> Change:
    """Return the change of a module attribute that no longer holds a parameter."""
    old = str(before) if before else "None"
    cause = "`module.weight = None`, `del module.weight`, or a submodule taken out"
    return Change(name, "removed", old, "None", f"removed from its module; it was {old}", cause)


CASTS = {torch.float16: "half", torch.bfloat16: "bfloat16", torch.float32: "float", torch.float64: "double"}


def _cause(kind: str, after: Description) -> str:
    """Return the code that most often causes this kind of change."""
    if kind == "device":
        method = "cpu()" if after.device.type == "cpu" else f"to({str(after.device)!r})"
        return f"`model.{method}`"
    if kind == "dtype":
        method = f"{CASTS[after.dtype]}()" if after.dtype in CASTS else f"to({after.dtype})"
        return f"`model.{method}`"
    if kind == "shape":
        return "`p.data = ...` with a tensor of another shape"
    if kind == "strides":
        return "`model.to(memory_format=...)`, or `p.data = ...` with a transposed tensor"
    return "`p.data = ...`, a resized storage, or converting the model and back"
