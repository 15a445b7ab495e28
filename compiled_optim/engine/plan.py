"""The plan of a step: buckets bound to compiled calls. A new plan is made only if the old one is not valid."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor

from compiled_optim.backends import Backend, BoundCall
from compiled_optim.engine import layout, states
from compiled_optim.engine.amp import unscale_unless_skipped
from compiled_optim.engine.bound import BoundBucket, TensorBucket, add_up
from compiled_optim.engine.buckets import Bucket
from compiled_optim.engine.clipping import GradScaling
from compiled_optim.engine.flat import FlatBucket
from compiled_optim.engine.flat_memory import FlatMemory
from compiled_optim.engine.matrices import MatrixBucket, Workspace
from compiled_optim.engine.rows import RowReader
from compiled_optim.engine.rule import Group, Rule


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
        memory: FlatMemory | None = None,
    ) -> None:
        self._rule = rule
        self._totals: Tensor | None = None
        backends = {bucket.backend for bucket in buckets}
        self._checks = [each.check_step for each in backends if type(each).check_step is not Backend.check_step]
        readers = [RowReader(rule.for_group(group), group) for group in groups]
        self.scaling = GradScaling(rule, buckets, clips_any(rule, groups))
        self._counts_steps = any(rule.for_group(group).counts_steps for group in groups)
        workspace = Workspace(buckets)
        self.buckets: list[BoundBucket] = []
        for bucket in buckets:
            if bucket.is_flat and memory is not None:
                self.buckets.append(FlatBucket(bucket, readers, state, memory))
            elif bucket.matrix_map is not None:
                self.buckets.append(MatrixBucket(bucket, readers, state, grads, workspace))
            else:
                self.buckets.append(TensorBucket(bucket, readers, state, grads))
        self.entries = [entry for bucket in buckets for entry in bucket.entries]
        # for a sharded parameter, both the shard and the DTensor
        written = [(entry.index, tensor) for entry in self.entries for tensor in {entry.local, entry.param}]
        self._written = [tensor for _, tensor in written]
        self._written_by_index = written
        self._groups = list(groups)
        self._group_sizes = [len(group["params"]) for group in groups]
        self._rule = rule
        self._keys = [rule.plan_key(group) for group in groups]

    @property
    def keeps_state(self) -> bool:
        """Whether parameters that were stepped have an entry in the state."""
        return self._counts_steps or any(bound.bucket.program.states for bound in self.buckets)

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
        if [self._rule.plan_key(group) for group in groups] != self._keys:
            return False
        return all(bucket.scalar_rows.fill() for bucket in self.buckets)

    @property
    def skips_on_device(self) -> bool:
        """Whether all updates take ``found_inf``."""
        return all(bound.bucket.takes_found_inf for bound in self.buckets)

    def check_backends(self) -> None:
        """Raise if a backend cannot make a step now."""
        for check in self._checks:
            check()

    def run(
        self,
        grads: Sequence[Tensor | None],
        some_absent: bool,
        unscale: Tensor | None,
        found_inf: Tensor | None = None,
    ) -> Tensor | None:
        """Make one step; return the norm of the gradients if they are clipped.

        ``some_absent`` is True if the gradient of a planned parameter may be None. If ``found_inf`` is not 0, the
        device changes nothing; the host counts the step in any case.
        """
        picked = [bucket.pick_grads(grads) for bucket in self.buckets]
        if unscale is not None:
            self._unscale_converted(grads, unscale, found_inf)
        norm = None
        if unscale is not None or self.scaling.clips:
            norm = self.scaling.run([bucket.scalar_rows for bucket in self.buckets], picked, unscale, found_inf)
        # compiled code writes through pointers, so autograd's version counters are incremented here
        written = self._written
        if some_absent:
            written = [tensor for index, tensor in self._written_by_index if grads[index] is not None]
        if unscale is not None:
            written = [*written, *(grad for own in picked for grad in own if grad is not None)]
        torch.autograd.graph.increment_version(written)
        measured = self._measure_over_all(picked) if self._rule.sums_over_all and self.buckets else 0
        for bucket, bucket_grads in zip(self.buckets, picked, strict=True):
            # a process without gradients still takes part in what the others compute of its shards
            if some_absent and bucket.bucket.shards is None and all(grad is None for grad in bucket_grads):
                continue
            bucket.run(bucket_grads, some_absent, measured)
        return norm

    def _measure_over_all(self, grads: Sequence[Sequence[Tensor | None]]) -> int:
        """Compute the sums of the rule over all parameters; return the number of stages that are measured now."""
        over_all = self.buckets[0].bucket.stages_over_all
        found = []
        for stage in range(over_all.stop):
            sums = [bucket.measure(stage, own) for bucket, own in zip(self.buckets, grads, strict=True)]
            if stage in over_all:
                found.append(add_up(sums))
                for bucket in self.buckets:
                    bucket.set_totals(stage, found[-1])
        self._totals = torch.cat(found) if len(found) > 1 else found[0]
        return over_all.stop

    def sums(self) -> list[float]:
        """Return the sums over all parameters of the last step, if the rule has such. The host waits for them."""
        return [] if self._totals is None else self._totals.tolist()

    def remove_unused_states(self) -> None:
        """Remove the states that were created for parameters which are not updated yet, after a step that failed."""
        for bucket in self.buckets:
            bucket.remove_unused_states()

    def _unscale_converted(self, grads: Sequence[Tensor | None], unscale: Tensor, found_inf: Tensor | None) -> None:
        """Unscale gradients of which the calls have converted copies. The calls unscale the others themselves."""
        for bound in self.buckets:
            converted = [grads[bound.bucket.entries[i].index] for i in bound.converted]
            present = [grad for grad in converted if grad is not None]
            if present:
                factor = unscale_unless_skipped(unscale, found_inf)
                torch._foreach_mul_(present, factor.to(bound.bucket.device))
