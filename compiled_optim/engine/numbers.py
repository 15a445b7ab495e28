"""Numbers of a parameter that a rule keeps from step to step: ``step``, and those that :attr:`Rule.numbers` declares.

They are 0-dim tensors in the state, on the host. Their dtype is float32 as in torch.optim, or float64 if that is the
default dtype.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from operator import add
from typing import Any

import torch
from torch import Tensor

from compiled_optim.engine.rule import Group, Rule
from compiled_optim.engine.tensor_types import is_fake
from compiled_optim.modes import outside_of_modes

REMEDY = "load the checkpoint that belongs to this model, or delete the entry from optimizer.state to start fresh"


def typecode() -> str:
    """Return the type in which numbers are kept, as for ``array``: float32, or float64 if that is the default dtype.

    Not the default dtype if it is lower: float32 counts exactly to 2^24, bfloat16 to 256.
    """
    return "d" if torch.get_default_dtype() == torch.float64 else "f"


def rounded(value: float) -> float:
    """Return a value as a number of a parameter keeps it."""
    return float(array(typecode(), [value])[0])


class Numbers:
    """One number of each parameter of a bucket.

    ``tensors`` are the elements of one tensor, so user code that changes one of them by any means is detected by
    comparing the memory.
    """

    def __init__(self, values: Iterable[float]) -> None:
        self.values: array[Any] = array(typecode(), values)
        dtype = torch.float64 if self.values.typecode == "d" else torch.float32
        with outside_of_modes():
            self.tensors = torch.frombuffer(self.values, dtype=dtype).unbind()
        self._written = self.values.tobytes()

    def are_unchanged(self) -> bool:
        """Return True if only this object has written to the tensors."""
        return self.values.tobytes() == self._written

    def write(self, values: Iterable[float]) -> None:
        """Set the number of each parameter."""
        self.values[:] = array(self.values.typecode, values)
        self._written = self.values.tobytes()

    def write_all(self, value: float) -> None:
        """Set all of them to the same value."""
        self.values[:] = array(self.values.typecode, [value]) * len(self.values)
        self._written = self.values.tobytes()


class StepCounters:
    """The step counts of the parameters of a bucket: exact integers, and the ``step`` tensors of the state.

    Counts stop at ``limit``.
    """

    def __init__(self, counts: Sequence[int], limit: int | None) -> None:
        self.counts = array("q", counts)
        self.are_equal = len(set(counts)) <= 1
        self._limit = limit
        self.public = Numbers(counts)

    def are_unchanged(self) -> bool:
        """Return True if only this object has written to the ``step`` tensors."""
        return self.public.are_unchanged()

    def after(self, present: Sequence[bool] | None) -> array[int]:
        """Return the counts after a step of the parameters that are ``present``; None means all."""
        if present is None and self.are_equal:
            count = self.counts[0] + 1
            return array("q", [count if self._limit is None else min(count, self._limit)]) * len(self.counts)
        counts = map(add, self.counts, repeat(1) if present is None else present)
        return array("q", counts if self._limit is None else map(min, counts, repeat(self._limit)))

    def set(self, counts: array[int], are_equal: bool) -> None:
        """Write counts. After an interrupt, the same call can be repeated."""
        self.counts, self.are_equal = counts, are_equal
        if are_equal:
            self.public.write_all(counts[0])
        else:
            self.public.write(counts)


def kept_numbers(
    rule: Rule, group: Group, values: Mapping[str, Any], parameter_name: Callable[[], str]
) -> tuple[float, ...]:
    """Return the numbers of a parameter from its state, in the order of ``rule.numbers``; raise if one is no number."""
    found = []
    for name, initial in rule.initial_numbers(group).items():
        value = values.get(name, initial)
        number = as_number(value)
        if number is None:
            raise ValueError(f"{name!r} of {parameter_name()} is {value!r}, not a number; {REMEDY}")
        found.append(number)
    return tuple(found)


def as_number(value: object) -> float | None:
    """Return a number of a state: a tensor, or in older checkpoints a Python number; None for anything else."""
    if isinstance(value, Tensor):
        with outside_of_modes():
            value = value.item() if value.numel() == 1 and not is_fake(value) else None
    return float(value) if isinstance(value, int | float) else None


def step_count(step: object) -> int | None:
    """Return a number of steps, which is a tensor in torch and an int in torch_npu; None if it is no such number."""
    number = as_number(step)
    if number is not None and math.isfinite(number) and number >= 0 and number == int(number):
        return int(number)
    return None


def place_number(values: dict[str, Any], name: str, number: Tensor, taken: set[int]) -> Tensor:
    """Make ``number`` a number of a parameter, and return the tensor in its state.

    A tensor that is there already stays the same object: it is pointed to the memory of ``number``. ``taken`` are the
    ids of the tensors of other parameters.
    """
    existing = values.get(name)
    if (
        isinstance(existing, Tensor)
        and existing.device == number.device
        and existing.ndim == 0
        and not existing.requires_grad
        and id(existing) not in taken
    ):
        existing.data = number
        number = existing
    values[name] = number
    taken.add(id(number))
    return number
