"""The plan of a step: buckets bound to compiled calls. A new plan is made only if the old one is not valid."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import is_

import torch
from torch import Tensor

from compiled_optim.backends import BoundArguments, BoundBatch, BoundCall
from compiled_optim.engine import layout, states
from compiled_optim.engine.buckets import Bucket, Entry
from compiled_optim.engine.clipping import GradScaling
from compiled_optim.engine.numbers import Numbers, StepCounters, place_number
from compiled_optim.engine.rows import Progress, RowReader, Rows
from compiled_optim.engine.rule import Group, Rule
from compiled_optim.tensors import picker


class BoundBucket:
    """A bucket bound to its parameters, states and compiled calls."""

    def __init__(
        self,
        bucket: Bucket,
        rule: Rule,
        readers: Sequence[RowReader],
        state: states.State,
        grads: Sequence[Tensor | None],
    ) -> None:
        self.bucket = bucket
        program, entries = bucket.program, bucket.entries
        self._pick = picker([entry.index for entry in entries])
        self._grad_views = self._views_of(self._pick(grads))
        # a parameter that is not dense is updated in a dense copy
        self._copies: list[tuple[Tensor, Tensor]] = []
        self.copied: list[Entry] = []
        limit = None if rule.counts_steps else int(bool(program.states))  # 1 means that there are states
        counters = StepCounters([entry.steps for entry in entries], limit)
        numbers = [Numbers(values) for values in zip(*(entry.numbers for entry in entries), strict=True)]
        named = {"step": counters.public} if rule.counts_steps else {}
        named |= zip(rule.numbers, numbers, strict=True)
        initial = {i: rule.initial_states(bucket.groups[i], program.states) for i in bucket.group_numbers}
        kept, placed = [], []
        taken: set[int] = set()
        self._state = state
        self._created: list[int] = []
        keeps_state = bool(named or program.states)
        for i, entry in enumerate(entries):
            values = state[entry.param] if keeps_state else {}
            if keeps_state and not values:
                self._created.append(i)
            placed += [place_number(values, name, own.tensors[i], taken) for name, own in named.items()]
            kept.append(states.materialize_states(values, entry.param, entry.local, initial[entry.group], bucket.rows))
        self.states = [*placed, *(tensor for tensors in kept for tensor in tensors)]
        self.scalar_rows = Rows(bucket, counters, numbers, readers)
        totals = None
        if bucket.sums:
            totals = torch.zeros(bucket.sums, len(entries), dtype=bucket.sum_dtype, device=bucket.device)
        self._totals = totals
        lists = [[self._updated(entry) for entry in entries], *map(list, zip(*kept, strict=True))]
        if not bucket.backend.by_address:
            lists = [[layout.working_view(tensor, bucket.rows) for tensor in tensors] for tensors in lists]
        arguments = BoundArguments(
            self.scalar_rows.scalars,
            self.scalar_rows.inv_scale if program.unscales else None,
            self.scalar_rows.grad_scale if program.scaled else None,
            totals,
        )
        self._measure = None if bucket.measure is None else bucket.measure.bind(lists, arguments)
        self._update = bucket.update.bind(lists, arguments)

    def bound_batches(self) -> list[BoundBatch]:
        """Return the bound batches of the update, one for each phase."""
        return [self._update] if self._measure is None else [self._measure, self._update]

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

    def run(self, grads: Sequence[Tensor | None], some_absent: bool) -> None:
        """Update the parameters and states in place. ``some_absent`` is True if a gradient may be None.

        If an exception ends the update, such as KeyboardInterrupt, the steps of updated parameters are counted.
        """
        for copy, param in self._copies:
            copy.copy_(param)
        if self._measure is not None:
            self._measure(grads)
            assert self.bucket.shards is not None
            assert self._totals is not None
            self.bucket.shards.all_reduce_(self._totals)
        present = [grad is not None for grad in grads] if some_absent else None
        before, runs = self.scalar_rows.progress(), self._update.runs[:]
        after = self.scalar_rows.after(present)
        try:
            self._update(grads)
            self._finish(after, present is None)
            self._created = []
        except BaseException:
            updated = self._update.updated_since(runs, len(grads))
            if any(updated):
                self._finish(before.partly(after, updated), False)
                self._created = [i for i in self._created if not updated[i]]
            raise

    def _finish(self, progress: Progress, in_step: bool) -> None:
        """Write to parameters that are not dense, and count the step. The call can be repeated."""
        for copy, param in self._copies:
            param.copy_(copy)
        self.scalar_rows.write(progress, in_step)

    def remove_unused_states(self) -> None:
        """Remove the states that were created for parameters which are not updated yet."""
        for i in self._created:
            self._state.pop(self.bucket.entries[i].param, None)

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


def _converted(param: Tensor, rows: bool, dtype: torch.dtype, by_address: bool, grad: Tensor) -> Tensor:
    """Return a copy of a gradient with the dtype and the strides that the calls need."""
    copy = layout.copy_like(param, grad, rows, dtype)
    return copy if by_address else layout.working_view(copy, rows)


def clips_any(rule: Rule, groups: Sequence[Group]) -> bool:
    """Return True if the gradients of any group are clipped."""
    return any(rule.clips(group, torch.float32) for group in groups)


class Plan:
    """All buckets of an optimizer, bound. Their units are compiled before, because a plan changes the state."""

    def __init__(
        self,
        rule: Rule,
        groups: Sequence[Group],
        state: states.State,
        buckets: Sequence[Bucket],
        grads: Sequence[Tensor | None],
    ) -> None:
        self._rule = rule
        readers = [RowReader(rule, group) for group in groups]
        self.scaling = GradScaling(rule, buckets, clips_any(rule, groups))
        self.buckets = [BoundBucket(bucket, rule, readers, state, grads) for bucket in buckets]
        self.entries = [entry for bucket in buckets for entry in bucket.entries]
        # for a sharded parameter, both the shard and the DTensor
        written = [(entry.index, tensor) for entry in self.entries for tensor in {entry.local, entry.param}]
        self._written = [tensor for _, tensor in written]
        self._written_by_index = written
        self._groups = list(groups)
        self._group_sizes = [len(group["params"]) for group in groups]

    @property
    def keeps_state(self) -> bool:
        """Whether parameters that were stepped have an entry in the state."""
        return self._rule.counts_steps or any(bound.bucket.program.states for bound in self.buckets)

    def calls(self) -> dict[int, list[BoundCall]]:
        """Return the calls of a step, by the index of the bucket."""
        found = {}
        for i, (bound, norm) in enumerate(zip(self.buckets, self.scaling.norms, strict=True)):
            batches = [*bound.bound_batches(), *([] if norm is None else [norm])]
            found[i] = [call for batch in batches for call in batch.calls]
        return found

    @property
    def states(self) -> list[Tensor]:
        """All state tensors the calls are bound to."""
        return [state for bucket in self.buckets for state in bucket.states]

    def skippable(self, grads: Sequence[Tensor | None]) -> dict[int, Tensor | None]:
        """Return, by index, a tensor that looks like the gradient if a step may skip the parameter, else None."""
        found: dict[int, Tensor | None] = {}
        for bound in self.buckets:
            takes_rows = bound.bucket.backend.takes_rows
            found |= {entry.index: entry.local if takes_rows else None for entry in bound.bucket.entries}
            for i in bound.converted if takes_rows else ():
                grad = grads[bound.bucket.entries[i].index]
                if grad is not None:
                    found[bound.bucket.entries[i].index] = layout.without_memory(grad)
        return found

    def refresh(self, groups: Sequence[Group]) -> bool:
        """Compute the hyperparameters of this step; return False if the plan is no longer valid for these groups."""
        if len(groups) != len(self._groups) or not all(map(is_, groups, self._groups)):
            return False
        if [len(group["params"]) for group in groups] != self._group_sizes:
            return False
        return all(bucket.scalar_rows.fill() for bucket in self.buckets)

    def run(self, grads: Sequence[Tensor | None], some_absent: bool, unscale: Tensor | None) -> Tensor | None:
        """Make one step; return the norm of the gradients if they are clipped.

        ``some_absent`` is True if the gradient of a planned parameter may be None.
        """
        picked = [bucket.pick_grads(grads) for bucket in self.buckets]
        if unscale is not None:
            self._unscale_converted(grads, unscale)
        norm = None
        if unscale is not None or self.scaling.clips:
            norm = self.scaling.run([bucket.scalar_rows for bucket in self.buckets], picked, unscale)
        # compiled code writes through pointers, so autograd's version counters are incremented here
        written = self._written
        if some_absent:
            written = [tensor for index, tensor in self._written_by_index if grads[index] is not None]
        if unscale is not None:
            written = [*written, *(grad for own in picked for grad in own if grad is not None)]
        torch.autograd.graph.increment_version(written)
        for bucket, bucket_grads in zip(self.buckets, picked, strict=True):
            bucket.run(bucket_grads, some_absent)
        return norm

    def remove_unused_states(self) -> None:
        """Remove the states that were created for parameters which are not updated yet, after a step that failed."""
        for bucket in self.buckets:
            bucket.remove_unused_states()

    def _unscale_converted(self, grads: Sequence[Tensor | None], unscale: Tensor) -> None:
        """Unscale gradients of which the calls have converted copies. The calls unscale the others themselves."""
        for bound in self.buckets:
            for i in bound.converted:
                grad = grads[bound.bucket.entries[i].index]
                if grad is not None:
                    grad.mul_(unscale.to(grad.device))
