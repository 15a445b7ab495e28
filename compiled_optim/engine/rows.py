"""Rows of scalars: parameters that differ in group or step count share a call, each with its own row."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import add

import torch

from compiled_optim.backends import ScalarRows
from compiled_optim.engine.buckets import Bucket
from compiled_optim.engine.rule import Rule, Variant
from compiled_optim.engine.states import StepCounters

GROUP_SHIFT = 48
"""A key of a row is the number of the group, shifted by this many bits, plus the step count."""


class Rows:
    """The rows of a bucket: one for each group and step count that its parameters have.

    ``groups`` are the numbers of the groups of the rows. ``grad_scale`` is the factor of the gradients of each row.
    """

    def __init__(self, bucket: Bucket, counters: StepCounters) -> None:
        tensors, dtype = len(bucket.entries), bucket.program.dtype
        self.bucket = bucket
        self.counters = counters
        self.scalars = ScalarRows(len(bucket.program.scalars), tensors, dtype)
        self.grad_scale = torch.ones(tensors, dtype=dtype, device=bucket.device)
        self._group_keys = [entry.group << GROUP_SHIFT for entry in bucket.entries]
        self.groups: list[int] = []
        self._steps: list[int] = []
        self._assign()

    def fill(self, rule: Rule, variants: Sequence[Variant]) -> bool:
        """Write the hyperparameters of this step; return False if they need another program, or counts have changed.

        ``variants`` are those of the groups in the plan.
        """
        if not self.counters.are_unchanged():
            return False
        values = []
        for number, steps in zip(self.groups, self._steps, strict=True):
            scalars, variant = rule.row(self.bucket.groups[number], steps + 1)
            if variant != variants[number]:
                return False
            values.append([*scalars.values()])
        self.scalars.fill(values)
        return True

    def advance(self, present: Sequence[bool] | None) -> None:
        """Count a step of the parameters that are ``present``; None means all."""
        self.counters.advance(present)
        if present is None and len(self._steps) == 1:
            self._steps = [self.counters.counts[0]]
        else:
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
