"""Buckets bound to parameters, states and compiled calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compiled_optim.backends import BoundArguments, BoundBatch
from compiled_optim.engine import layout, states
from compiled_optim.engine.buckets import Bucket, Entry
from compiled_optim.engine.numbers import Numbers, StepCounters, place_number
from compiled_optim.engine.rows import Progress, RowReader, Rows
from compiled_optim.engine.split_means import SplitMeans
from compiled_optim.tensors import picker


class BoundBucket(ABC):
    """A bucket bound to its parameters, states and compiled calls. A subclass knows where they lie in memory."""

    def __init__(self, bucket: Bucket, readers: Sequence[RowReader], state: states.State) -> None:
        self.bucket = bucket
        program, entries, rule = bucket.program, bucket.entries, bucket.rule
        self._pick = picker([entry.index for entry in entries])
        self.copied: list[Entry] = []
        """The parameters that are updated in copies."""
        limit = None if rule.counts_steps else int(bool(program.states))  # 1 means that there are states
        counters = StepCounters([entry.steps for entry in entries], limit)
        numbers = [Numbers(values) for values in zip(*(entry.numbers for entry in entries), strict=True)]
        named = {"step": counters.public} if rule.counts_steps else {}
        named |= zip(rule.numbers, numbers, strict=True)
        initial = {i: rule.initial_states(bucket.groups[i], program.states) for i in bucket.group_numbers}
        self._state = state
        keeps_state = bool(named or program.states)
        values = [state[entry.param] if keeps_state else {} for entry in entries]
        self.created = [i for i, own in enumerate(values) if keeps_state and not own]
        """The indices of the entries that have states since this bucket was bound, and are not updated yet."""
        taken: set[int] = set()
        placed = [
            place_number(own, name, number.tensors[i], taken)
            for i, own in enumerate(values)
            for name, number in named.items()
        ]
        kept, lists = self._place(values, [initial[entry.group] for entry in entries])
        self.states = [*placed, *kept]
        self.scalar_rows = Rows(bucket, counters, numbers, readers)
        self._totals = None
        if bucket.stages:
            self._totals = torch.zeros(sum(bucket.stages), len(entries), dtype=bucket.sum_dtype, device=bucket.device)
        arguments = BoundArguments(
            self.scalar_rows.scalars,
            self.scalar_rows.inv_scale if program.unscales else None,
            self.scalar_rows.grad_scale if program.scaled else None,
            self._totals,
            **self._row_arguments(),
            found_inf=self.scalar_rows.found_inf,
        )
        self._means = [SplitMeans(bucket, number) for number in range(len(program.means))]
        lists = [*lists, *(means.tensors for means in self._means)]
        self._measures = [batch.bind(lists, arguments) for batch in bucket.measures]
        self._prepare = None if bucket.prepare is None else bucket.prepare.bind(lists, arguments)
        self._update = bucket.update.bind(lists, arguments)

    @abstractmethod
    def _place(
        self, values: Sequence[dict[str, Any]], initial: Sequence[Mapping[str, float | None]]
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Create missing states. Return the state tensors, and the lists that calls work on, parameters first.

        ``values`` are the states of each parameter, and ``initial`` the initial values of its states.
        """

    def _row_arguments(self) -> dict[str, Tensor]:
        """Return the arguments that describe the rows of a flat buffer."""
        return {}

    @abstractmethod
    def pick_grads(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the gradients of this bucket, as its calls take them."""

    @property
    @abstractmethod
    def converted(self) -> Sequence[int]:
        """The indices, among the entries, of gradients of which the calls get copies."""

    @abstractmethod
    def run(self, grads: Sequence[Tensor | None], some_absent: bool, first_stage: int = 0) -> None:
        """Update the parameters and states in place. ``grads`` are the result of :meth:`pick_grads`.

        ``some_absent`` is True if one may be None. The stages before ``first_stage`` are measured. If an exception ends
        the update, such as KeyboardInterrupt, the steps of updated parameters are counted.
        """

    def measure(self, stage: int, grads: Sequence[Tensor | None]) -> Tensor:
        """Compute the sums of a stage over each tensor and all its shards; return them, a row for each sum.

        A stage of means returns none.
        """
        totals = self._totals_of(stage)
        if not len(totals):
            self._means[self.bucket.stages[:stage].count(0)].compute(self._measures[stage], grads)
            return totals
        measured = self._measures[stage](grads)
        if measured is None:  # there are no elements
            totals.zero_()
        else:
            totals.copy_(measured)
        if self.bucket.shards is not None:
            self.bucket.shards.all_reduce_(totals)
        return totals

    def set_totals(self, stage: int, sums: Tensor) -> None:
        """Let all tensors use these sums of a stage."""
        self._totals_of(stage).copy_(sums.unsqueeze(1))

    def _totals_of(self, stage: int) -> Tensor:
        """Return the sums of a stage, a row for each."""
        assert self._totals is not None
        first, count = sum(self.bucket.stages[:stage]), self.bucket.stages[stage]
        return self._totals[first : first + count]

    def bound_batches(self) -> list[BoundBatch]:
        """Return the bound batches of the update, in order."""
        return [*self._measures, *([] if self._prepare is None else [self._prepare]), self._update]

    def remove_unused_states(self) -> None:
        """Remove the states that were created for parameters which are not updated yet."""
        for i in self.created:
            self._state.pop(self.bucket.entries[i].param, None)


class TensorBucket(BoundBucket):
    """A bucket whose parameters stay where they are."""

    def __init__(
        self, bucket: Bucket, readers: Sequence[RowReader], state: states.State, grads: Sequence[Tensor | None]
    ) -> None:
        # a parameter that is not dense is updated in a dense copy
        self._copies: list[tuple[Tensor, Tensor]] = []
        super().__init__(bucket, readers, state)
        self._grad_views = self._views_of(self._pick(grads))

    def pick_grads(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the gradients of this bucket, converted and viewed as the calls need them."""
        picked: Sequence[Tensor | None] = self._pick(grads)
        if not self._grad_views:
            return picked
        viewed = list(picked)
        for i, view in self._grad_views.items():
            grad = viewed[i]
            viewed[i] = grad if grad is None else view(grad)
        return viewed

    @property
    def converted(self) -> list[int]:
        """The indices, among the entries, of gradients that are converted before use."""
        return [i for i, view in self._grad_views.items() if view.func is _converted]

    def run(self, grads: Sequence[Tensor | None], some_absent: bool, first_stage: int = 0) -> None:
        """Update the parameters and states in place."""
        self._prepare_update(grads, first_stage)
        present = [grad is not None for grad in grads] if some_absent else None
        before, runs = self.scalar_rows.progress(), self._update.runs[:]
        after = self.scalar_rows.after(present)
        try:
            self._update(grads)
            self._finish(after, present is None)
            self.created = []
        except BaseException:
            updated = self._update.updated_since(runs, len(grads))
            if any(updated):
                self._finish(before.partly(after, updated), False)
                self.created = [i for i in self.created if not updated[i]]
            raise

    def measure(self, stage: int, grads: Sequence[Tensor | None]) -> Tensor:
        """Compute the sums of a stage, or its means, as in the base class."""
        if stage == 0:
            self._load_copies()
        return super().measure(stage, grads)

    def _prepare_update(self, grads: Sequence[Tensor | None], first_stage: int) -> None:
        """Compute what the update needs, from this stage on."""
        if not self.bucket.stages:
            self._load_copies()
        for stage in range(first_stage, len(self.bucket.stages)):
            self.measure(stage, grads)

    def _load_copies(self) -> None:
        """Copy the parameters that are not dense."""
        for copy, param in self._copies:
            copy.copy_(param)

    def _finish(self, progress: Progress, in_step: bool) -> None:
        """Write to parameters that are not dense, and count the step. The call can be repeated."""
        for copy, param in self._copies:
            param.copy_(copy)
        self.scalar_rows.write(progress, in_step)

    def _place(
        self, values: Sequence[dict[str, Any]], initial: Sequence[Mapping[str, float | None]]
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        bucket = self.bucket
        rows, program, nonnegative = bucket.rows, bucket.program, bucket.rule.nonnegative
        kept = [
            states.materialize_states(
                own, entry.param, entry.local, first, rows, program, bucket.kept_dtypes(entry), nonnegative
            )
            for own, entry, first in zip(values, bucket.entries, initial, strict=True)
        ]
        lists = [[self._updated(entry) for entry in bucket.entries], *map(list, zip(*kept, strict=True))]
        if not bucket.backend.by_address:
            program = bucket.program
            lists = [
                tensors if i in program.row_lists else [layout.working_view(tensor, bucket.rows) for tensor in tensors]
                for i, tensors in enumerate(lists, 1)  # without the gradients
            ]
        return [tensor for tensors in kept for tensor in tensors], lists

    def _updated(self, entry: Entry) -> Tensor:
        """Return the tensor that is updated: the parameter itself, or a copy if it is not dense."""
        rows = self.bucket.rows
        if layout.has_working_view(entry.local, rows):
            return entry.local if self.bucket.backend.by_address else entry.local.detach()
        param = entry.local.detach()
        copy = layout.copy_like(param, param, rows)
        self._copies.append((copy, param))
        self.copied.append(entry)
        return copy

    def _views_of(self, grads: Sequence[Tensor | None]) -> dict[int, partial[Tensor]]:
        """Return, by index, the function that converts or views a gradient; none for gradients used as they are."""
        rows, by_address = self.bucket.rows, self.bucket.backend.by_address
        views: dict[int, partial[Tensor]] = {}
        for i, (entry, grad) in enumerate(zip(self.bucket.entries, grads, strict=True)):
            like = entry.local if grad is None else grad  # a later gradient that differs from it makes a new plan
            if like.dtype != entry.grad_dtype or not layout.pairs_with(entry.local, like, rows):
                views[i] = partial(_converted, entry.local, rows, entry.grad_dtype, by_address)
            elif not by_address:
                views[i] = partial(layout.working_view, rows=rows)
        return views


def _converted(param: Tensor, rows: int, dtype: torch.dtype, by_address: bool, grad: Tensor) -> Tensor:
    """Return a copy of a gradient with the dtype and the strides that the calls need."""
    copy = layout.copy_like(param, grad, rows, dtype)
    return copy if by_address else layout.working_view(copy, rows)


def add_up(totals: Sequence[Tensor]) -> Tensor:
    """Return the sums over the columns of all these matrices. They are computed on an accelerator if one is there."""
    device = next((each.device for each in totals if each.device.type != "cpu"), totals[0].device)
    sums = [each.sum(1).to(device, non_blocking=True) for each in totals]
    dtype = max((each.dtype for each in sums), key=lambda dtype: dtype.itemsize)
    return torch.stack([each.to(dtype) for each in sums]).sum(0)
