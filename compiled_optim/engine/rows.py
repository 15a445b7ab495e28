"""Rows of scalars: parameters that differ in group or step count share a call, each with its own row."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from operator import add, itemgetter
from typing import Any

import torch

from compiled_optim.backends import ScalarRows
from compiled_optim.engine.buckets import Bucket
from compiled_optim.engine.rule import Group, Rule, by_name, declaration
from compiled_optim.engine.states import StepCounters

GROUP_SHIFT = 48
"""A key of a row is the number of the group, shifted by this many bits, plus the step count."""


class RowReader:
    """Reads the row of one group in every step, faster than :meth:`Rule.row`, which it agrees with."""

    def __init__(self, rule: Rule, group: Group) -> None:
        scalars, variant = rule.row(group, 1)
        _, optional, _ = declaration(type(rule).update)
        self._rule, self._group, self._variant = rule, group, variant
        self._values = _getter(tuple(scalars))
        self._flags = _getter(tuple(name for name, _ in variant.flags))
        self._flag_values = tuple(value for _, value in variant.flags)
        self._optional = [(name, name in variant.states) for name in optional]

    def read(self, step: int) -> list[float] | None:
        """Return the values for this step; None if the hyperparameters now select another program."""
        rule, group, variant = self._rule, self._group, self._variant
        derived = rule.derived(group, step)
        known = by_name(group, derived)
        if (
            self._flags(known) != self._flag_values
            or bool(group["maximize"]) != variant.maximize
            or bool(rule.clips(group, torch.float32)) != variant.clips
        ):
            return None
        for name, is_kept in self._optional:
            if bool(derived.get(name)) != is_kept:
                return None
        return [*map(float, self._values(known))]


def _getter(names: tuple[str, ...]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Return a function that reads the values of these names from a mapping."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda known: tuple(known[name] for name in names)


class Rows:
    """The rows of a bucket: one for each group and step count that its parameters have.

    ``groups`` are the numbers of the groups of the rows. ``inv_scale`` unscales all gradients. ``grad_scale`` is a
    further factor of the gradients of each row.
    """

    def __init__(self, bucket: Bucket, counters: StepCounters, readers: Sequence[RowReader]) -> None:
        """``readers`` are those of all groups."""
        tensors, dtype = len(bucket.entries), bucket.program.dtype
        self.bucket = bucket
        self.counters = counters
        self._readers = readers
        self.scalars = ScalarRows(len(bucket.program.scalars), tensors, dtype)
        self.inv_scale = torch.ones((), dtype=dtype, device=bucket.device)
        self.grad_scale = torch.ones(tensors, dtype=dtype, device=bucket.device)
        self._group_keys = [entry.group << GROUP_SHIFT for entry in bucket.entries]
        self.groups: list[int] = []
        self._steps: list[int] = []
        self._assign()

    def fill(self) -> bool:
        """Write the hyperparameters of this step; return False if they need another program, or counts have changed."""
        if not self.counters.are_unchanged():
            return False
        values = []
        for number, steps in zip(self.groups, self._steps, strict=True):
            row = self._readers[number].read(steps + 1)
            if row is None:
                return False
            values.append(row)
        self.scalars.fill(values)
        return True

    def set_counts(self, counts: array[int], in_step: bool) -> None:
        """Write new step counts. ``in_step`` is True if all have advanced together. The call can be repeated."""
        if in_step and self.counters.are_equal:
            self.counters.set(counts, True)
            self._steps = [counts[0]] * len(self.groups)
        else:
            self.counters.set(counts, len({*counts}) == 1)
            self._assign()

    def _assign(self) -> None:
        """Give each parameter the row of its group and step count."""
        keys = list(map(add, self._group_keys, self.counters.counts))
        rows = {key: row for row, key in enumerate(dict.fromkeys(keys))}
        self.scalars.row_of[:] = array("q", map(rows.__getitem__, keys))
        groups = [key >> GROUP_SHIFT for key in rows]
        self._steps = [key & ((1 << GROUP_SHIFT) - 1) for key in rows]
        if groups != self.groups:
            self.groups = groups
            signs = [-1.0 if self.bucket.groups[number]["maximize"] else 1.0 for number in groups]
            self.grad_scale[: len(signs)] = torch.tensor(signs, dtype=self.grad_scale.dtype, device="cpu")
