"""Describe how a parameter was reallocated: what changed, the values before and after, and the likely cause."""

from __future__ import annotations

from collections.abc import Sequence
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

    ``kind`` is "shape", "device", "dtype", "strides", "storage", "replaced", "removed" or "added". If several of
    shape, device and dtype changed, ``kind`` is the first of them, and ``text`` names them all. A parameter that was
    added to a watched module is not in the optimizer.
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


def replacement(name: str, before: Description | None, after: Sequence[Description | None]) -> Change:
    """Return the change of a parameter of which a module now holds other ones in its place.

    ``before`` is None if it had been removed. A new parameter that has no memory is None in ``after``.
    """
    new = " and ".join(_text(description) for description in after)
    if before is None:
        text = f"set again, to a new object, {new}, after it had been removed"
        cause = "`module.weight = nn.Parameter(...)`"
    else:
        objects = "a new object" if len(after) == 1 else f"{len(after)} new objects"
        text = f"replaced by {objects}: {before} became {new}"
        cause = "`module.weight = nn.Parameter(...)`, a new submodule, or load_state_dict(assign=True)"
    return Change(name, "replaced", _text(before), new, text, cause)


def removal(name: str, before: Description | None) -> Change:
    """Return the change of a parameter that its module no longer holds."""
    old = _text(before)
    cause = "`module.weight = None`, `del module.weight`, or a submodule taken out"
    return Change(name, "removed", old, "None", f"removed from its module; it was {old}", cause)


def tie(name: str, before: Description | None, other: str, is_held: bool) -> Change:
    """Return the change of a parameter in whose place a module now holds another one that it held before.

    ``other`` is the name of that one, and ``is_held`` says whether the optimizer has it.
    """
    text = f"replaced by {other}, which the optimizer {'has already' if is_held else 'does not have'}"
    return Change(name, "replaced", _text(before), other, text, "`module.weight = other.weight`")


def addition(name: str, after: Description | None) -> Change:
    """Return the change of a watched module that holds a further parameter, which is not in the optimizer."""
    text = f"added to a watched module but not to the optimizer: {_text(after)}"
    return Change(name, "added", "None", _text(after), text, "a new submodule, or `module.weight = nn.Parameter(...)`")


def _text(description: Description | None) -> str:
    return "None" if description is None else str(description)


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
