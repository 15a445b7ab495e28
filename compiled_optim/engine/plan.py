"""The plan of a step: buckets bound to compiled calls. A new plan is made only if the old one is not valid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from compiled_optim.backends import BoundArguments, BoundBatch, BoundCall, Scalars
from compiled_optim.backends.lanes import picker
from compiled_optim.engine import layout, states
from compiled_optim.engine.buckets import Bucket, Entry
from compiled_optim.engine.clipping import GradScaling
from compiled_optim.engine.rule import Group, Rule, Variant


class BoundBucket:
    """A bucket bound to its parameters, states and compiled calls."""

    def __init__(
        self, bucket: Bucket, rule: Rule, variant: Variant, state: states.State, grads: Sequence[Tensor | None]
    ) -> None:
        self.bucket = bucket
        self.group = bucket.group
        self.variant = variant
        self.steps = bucket.steps
        self._counts_steps = rule.counts_steps
        program, rows, entries = bucket.program, bucket.rows, bucket.entries
        self._pick = picker([entry.index for entry in entries])
        self._grad_views = self._views_of(self._pick(grads))
        # a parameter that is not dense is updated in a dense copy
        self._copies: list[tuple[Tensor, Tensor]] = []
        self.copied: list[str] = []
        self.counter = states.new_step_counter(bucket.steps)
        self._counter_version = self.counter._version
        initial = {name: rule.initial_values.get(name, 0.0) for name in program.states}
        owned = [state[entry.param] if rule.counts_steps or initial else {} for entry in entries]
        if rule.counts_steps:
            for values in owned:
                values["step"] = self.counter
        kept = [
            states.materialize_states(values, entry.param, entry.local, initial, rows)
            for values, entry in zip(owned, entries, strict=True)
        ]
        self.states = [tensor for tensors in kept for tensor in tensors]
        self.scalars = Scalars(len(program.scalars), program.dtype)
        sign = -1.0 if variant.maximize else 1.0
        self.grad_scale = torch.full((), sign, dtype=program.dtype, device=bucket.device)
        lists = [[self._working_view(entry) for entry in entries]]
        lists += [[layout.working_view(tensor, rows) for tensor in tensors] for tensors in zip(*kept, strict=True)]
        totals = None
        if bucket.sums:
            totals = torch.zeros(bucket.sums, len(entries), dtype=bucket.sum_dtype, device=bucket.device)
        self._totals = totals
        arguments = BoundArguments(self.scalars, self.grad_scale if program.scaled else None, totals)
        self._measure = None if bucket.measure is None else bucket.measure.bind(lists, arguments)
        self._update = bucket.update.bind(lists, arguments)

    def bound_batches(self) -> list[BoundBatch]:
        """Return the bound batches of the update, one for each phase."""
        return [self._update] if self._measure is None else [self._measure, self._update]

    def is_counter_unchanged(self) -> bool:
        """Return True if only this bucket has written to the step counter."""
        return self.counter._version == self._counter_version

    def pick_grads(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Return the gradients of this bucket, converted and viewed as the calls need them."""
        picked: Sequence[Tensor] = self._pick(grads)
        if not self._grad_views:
            return picked
        viewed = list(picked)
        for i, view in self._grad_views.items():
            viewed[i] = view(viewed[i])
        return viewed

    def run(self, grads: Sequence[Tensor]) -> None:
        """Update the parameters and states in place."""
        for copy, param in self._copies:
            copy.copy_(param)
        if self._measure is not None:
            self._measure(grads)
            assert self.bucket.shards is not None
            assert self._totals is not None
            self.bucket.shards.all_reduce_(self._totals)
        self._update(grads)
        for copy, param in self._copies:
            param.copy_(copy)
        # without a step count, 1 means that there are states
        self.steps = self.steps + 1 if self._counts_steps else int(bool(self.states))
        self.counter.fill_(self.steps)
        self._counter_version = self.counter._version

    def _working_view(self, entry: Entry) -> Tensor:
        """Return the view that is updated: of the parameter itself, or of a copy if it is not dense."""
        param, rows = entry.local.detach(), self.bucket.rows
        if layout.has_working_view(param, rows):
            return layout.working_view(param, rows)
        copy = layout.copy_like(param, param, rows)
        self._copies.append((copy, param))
        self.copied.append(entry.name)
        return layout.working_view(copy, rows)

    def _views_of(self, grads: Sequence[Tensor]) -> dict[int, Callable[[Tensor], Tensor]]:
        """Return, by index, the function that converts or views a gradient; none for gradients used as they are."""
        rows = self.bucket.rows
        views: dict[int, Callable[[Tensor], Tensor]] = {}
        for i, (entry, grad) in enumerate(zip(self.bucket.entries, grads, strict=True)):
            dtype = entry.grad_dtype
            if grad.dtype != dtype or not layout.pairs_with(entry.local, grad, rows):
                views[i] = partial(_converted_view, entry.local, rows, dtype)
            elif not self.bucket.backend.grads_by_address:
                views[i] = partial(layout.working_view, rows=rows)
        return views


def _converted_view(param: Tensor, rows: bool, dtype: torch.dtype, grad: Tensor) -> Tensor:
    return layout.working_view(layout.copy_like(param, grad, rows, dtype), rows)


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
        variants = {id(group): rule.row(group, 1).variant for group in groups}
        self.scaling = GradScaling(rule, buckets, clips_any(rule, groups))
        self.buckets = [BoundBucket(bucket, rule, variants[id(bucket.group)], state, grads) for bucket in buckets]
        # for a sharded parameter, both the shard and the DTensor
        written = [tensor for bucket in buckets for entry in bucket.entries for tensor in (entry.local, entry.param)]
        self._written = list({id(tensor): tensor for tensor in written}.values())
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

    def refresh(self, groups: Sequence[Group], state_was_accessed: bool) -> bool:
        """Compute the hyperparameters of this step; return False if the plan is no longer valid for these groups."""
        if [*map(id, groups)] != [*map(id, self._groups)]:
            return False
        if [len(group["params"]) for group in groups] != self._group_sizes:
            return False
        for bucket in self.buckets:
            scalars, variant = self._rule.row(bucket.group, bucket.steps + 1)
            if variant != bucket.variant or (state_was_accessed and not bucket.is_counter_unchanged()):
                return False
            bucket.scalars.fill([*scalars.values()])
        return True

    def run(self, grads: Sequence[Tensor | None], unscale: Tensor | None) -> Tensor | None:
        """Make one step; return the norm of the gradients if they are clipped."""
        picked = [bucket.pick_grads(grads) for bucket in self.buckets]
        norm = None
        if unscale is not None or self.scaling.clips:
            norm = self.scaling.run(self.buckets, picked, unscale)
        for bucket, bucket_grads in zip(self.buckets, picked, strict=True):
            bucket.run(bucket_grads)
        # compiled code writes through pointers, so autograd's version counters are incremented here
        torch.autograd.graph.increment_version(self._written)
        return norm
