"""Rows of scalars: parameters that differ in group or step count share a call, each with its own row."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import add, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_optim.backends import ScalarRows
from compiled_optim.engine.buckets import Bucket
from compiled_optim.engine.numbers import Numbers, StepCounters
from compiled_optim.engine.rule import DECOUPLED, DTYPE_EPS, Constants, Group, Rule, by_name, declaration
from compiled_optim.engine.storage_options import KEYS, stored_options
from compiled_optim.update_program import EMA_DECAY, SHRINK

OWN_OPTIONS = frozenset({*KEYS, EMA_DECAY, DECOUPLED, "cautious"})
"""The keys of groups for options that every optimizer has."""

GROUP_SHIFT = 48
"""A key of a row is the number of a group with constants, shifted by this many bits, plus the step count.

If the rule keeps numbers, the key is a tuple of this and the numbers.
"""

Reading = tuple[list[float], tuple[float, ...]]
"""The scalars of a step, and the numbers of the parameters after it."""


class Progress(NamedTuple):
    """The step counts of the parameters of a bucket, and for each number of the rule its values."""

    counts: array[int]
    numbers: list[array[Any]]

    def partly(self, after: Progress, updated: Sequence[bool]) -> Progress:
        """Return the progress if only the parameters that are ``updated`` have advanced."""
        pairs = zip((self.counts, *self.numbers), (after.counts, *after.numbers), strict=True)
        counts, *numbers = (
            array(old.typecode, (b if is_updated else a for is_updated, a, b in zip(updated, old, new, strict=True)))
            for old, new in pairs
        )
        return Progress(counts, numbers)


class RowReader:
    """Reads the row of one group in every step, faster than :meth:`Rule.row`, which it agrees with.

    ``constants`` are those of parameters of one shape, see :meth:`Rule.constants`.
    """

    def __init__(self, rule: Rule, group: Group, constants: Constants = ()) -> None:
        scalars, variant = rule.row(group, 1)
        _, optional, keywords = declaration(type(rule).update)
        self._takes_eps = DTYPE_EPS in keywords
        self._rule, self._group, self._variant, self._constants = rule, group, variant, constants
        self._values = _getter(tuple(scalars))
        self._flags = _getter(tuple(name for name, _ in variant.flags))
        self._flag_values = tuple(value for _, value in variant.flags)
        self._optional = [(name, name in variant.states) for name in optional]
        self._numbers = _getter(tuple(rule.numbers))
        self._stored = stored_options(group)
        self._has_own = bool(variant.own_scalars) or variant.cautious or any(self._stored)
        self._options = OWN_OPTIONS.difference(keywords)  # Adam takes decoupled_weight_decay itself

    def with_constants(self, constants: Constants) -> RowReader:
        """Return a reader for parameters of the same group with other constants."""
        return RowReader(self._rule, self._group, constants) if constants != self._constants else self

    def read(self, step: int, numbers: tuple[float, ...], eps: float) -> Reading | None:
        """Return the values for this step; None if the hyperparameters now select another program.

        ``numbers`` are those of the parameters before the step, ``eps`` is the machine epsilon of their dtype.
        """
        rule, group, variant = self._rule, self._group, self._variant
        if self._constants:
            group = {**group, **dict(self._constants)}
        if numbers:
            group = {**group, **dict(zip(rule.numbers, numbers, strict=True))}
        own = None
        if self._has_own or not group.keys().isdisjoint(self._options) or rule.max_grad_norm_per_parameter is not None:
            if stored_options(group) != self._stored:
                return None
            own = rule.own_scalars(group, step)
            if tuple(own) != variant.own_scalars or bool(group.get("cautious")) != variant.cautious:
                return None
            if SHRINK in own:
                group = {**group, "weight_decay": 0.0}
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
        if own:
            known |= own
        if self._takes_eps:
            known[DTYPE_EPS] = eps
        return [*map(float, self._values(known))], self._numbers(known)


def _getter(names: tuple[str, ...]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Return a function that reads the values of these names from a mapping."""
    if len(names) > 1:
        return itemgetter(*names)
    if not names:
        return lambda known: ()
    (only,) = names  # itemgetter would not return a tuple
    return lambda known: (known[only],)


class Rows:
    """The rows of a bucket: one for each group, step count and numbers that its parameters have.

    ``groups`` are the numbers of the groups of the rows. ``inv_scale`` unscales all gradients. ``grad_scale`` is a
    further factor of the gradients of each row. ``found_inf`` is None if the update does not take it.
    """

    def __init__(
        self, bucket: Bucket, counters: StepCounters, numbers: Sequence[Numbers], readers: Sequence[RowReader]
    ) -> None:
        """``numbers`` are those that the rule keeps in addition to the step count, ``readers`` those of all groups."""
        tensors, dtype = len(bucket.entries), bucket.program.dtype
        self.bucket = bucket
        self.counters = counters
        self._numbers = numbers
        kinds = {kind: i for i, kind in enumerate(dict.fromkeys((e.group, e.constants) for e in bucket.entries))}
        self._group_of = [number for number, _ in kinds]
        self._readers = [readers[number].with_constants(constants) for number, constants in kinds]
        self._eps = torch.finfo(bucket.dtypes[1]).eps
        self.scalars = ScalarRows(len(bucket.program.scalars), tensors, dtype)
        self.inv_scale = torch.ones((), dtype=dtype, device=bucket.device)
        self.grad_scale = torch.ones(tensors, dtype=dtype, device=bucket.device)
        self.found_inf: Tensor | None = None
        if bucket.takes_found_inf:
            self.found_inf = torch.zeros((), dtype=torch.float32, device=bucket.device)
        self._kind_keys = [kinds[entry.group, entry.constants] << GROUP_SHIFT for entry in bucket.entries]
        self._kinds: list[int] = []
        self.groups: list[int] = []
        self._steps: list[int] = []
        self._before: list[tuple[float, ...]] = []
        self._after: list[tuple[float, ...]] = []
        self._assign()

    def fill(self) -> bool:
        """Write the hyperparameters of this step; return False if they need another program, or counts have changed."""
        if not self.counters.are_unchanged() or (self._numbers and not all(map(Numbers.are_unchanged, self._numbers))):
            return False
        values, after = [], []
        for kind, steps, before in zip(self._kinds, self._steps, self._before, strict=True):
            row = self._readers[kind].read(steps + 1, before, self._eps)
            if row is None:
                return False
            values.append(row[0])
            after.append(row[1])
        self.scalars.fill(values)
        self._after = after
        return True

    def progress(self) -> Progress:
        """Return the step counts and numbers of all parameters."""
        return Progress(self.counters.counts, [numbers.values[:] for numbers in self._numbers])

    def after(self, present: Sequence[bool] | None) -> Progress:
        """Return the step counts and numbers after a step of the parameters that are ``present``; None means all."""
        found = Progress(self.counters.after(present), [])
        row_of = self.scalars.row_of
        for place, numbers in enumerate(self._numbers):
            after = [row[place] for row in self._after]
            values: Iterable[float] = map(after.__getitem__, row_of)
            if present is not None:
                own = zip(present, values, numbers.values, strict=True)
                values = [new if is_present else old for is_present, new, old in own]
            found.numbers.append(array(numbers.values.typecode, values))
        return found

    def write(self, progress: Progress, in_step: bool) -> None:
        """Write step counts and numbers. ``in_step``: all have advanced together. The call can be repeated."""
        counts = progress.counts
        for numbers, values in zip(self._numbers, progress.numbers, strict=True):
            numbers.write(values)
        if in_step and self.counters.are_equal:
            self.counters.set(counts, True)
            self._steps = [counts[0]] * len(self.groups)
            if self._numbers:
                firsts = map(self.scalars.row_of.index, range(len(self.groups)))
                self._before = [tuple(numbers.values[first] for numbers in self._numbers) for first in firsts]
        else:
            self.counters.set(counts, len({*counts}) == 1)
            self._assign()

    def _assign(self) -> None:
        """Give each parameter the row of its group, step count and numbers."""
        keys: list[Any] = list(map(add, self._kind_keys, self.counters.counts))
        if self._numbers:
            keys = list(zip(keys, *(numbers.values for numbers in self._numbers), strict=True))
        rows = {key: row for row, key in enumerate(dict.fromkeys(keys))}
        self.scalars.row_of[:] = array("q", map(rows.__getitem__, keys))
        counts: list[int] = [key[0] for key in rows] if self._numbers else list(rows)
        self._before = [key[1:] for key in rows] if self._numbers else [()] * len(rows)
        self._kinds = [count >> GROUP_SHIFT for count in counts]
        groups = [self._group_of[kind] for kind in self._kinds]
        self._steps = [count & ((1 << GROUP_SHIFT) - 1) for count in counts]
        if groups != self.groups:
            self.groups = groups
            signs = [-1.0 if self.bucket.groups[number]["maximize"] else 1.0 for number in groups]
            self.grad_scale[: len(signs)] = torch.tensor(signs, dtype=self.grad_scale.dtype, device="cpu")
