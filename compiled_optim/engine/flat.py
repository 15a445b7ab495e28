"""Flat buffers: the parameters of a bucket, their gradients and their states, each kind in one long tensor.

A call works on a part of a buffer, whatever tensors lie there. So neither the number of calls nor the size of a
compiled graph depends on the number of tensors. Parameters and states are views of the buffers. Gradients are new
tensors in every step, and are copied into their buffer by one list operation.

Padding is zero at first. A rule may write anything there, also NaN; no result depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.engine import states
from compiled_optim.engine.bound import BoundBucket
from compiled_optim.engine.buckets import Bucket
from compiled_optim.engine.flat_memory import VISITS, FlatMemory
from compiled_optim.engine.rows import Progress, RowReader


class FlatBucket(BoundBucket):
    """A bucket whose tensors lie in flat buffers."""

    def __init__(self, bucket: Bucket, readers: Sequence[RowReader], state: states.State, memory: FlatMemory) -> None:
        self._memory = memory
        self._at = memory.placement(bucket)
        grads, members = self._at.buffers[0].views, set(self._at.views)
        self._grads = [grads[i] for i in self._at.views]
        self._others = [i for i in range(len(grads)) if i not in members]
        self._other_grads = [grads[i] for i in self._others]
        self._bystanders: list[Tensor] | None = None
        self._visitors: list[tuple[list[Tensor], list[Tensor]]] = []
        self._visits = 0
        super().__init__(bucket, readers, state)

    def pick_grads(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Copy the gradients of this bucket into their buffer; return its parts."""
        torch._foreach_copy_(self._grads, list(self._pick(grads)))
        if self._other_grads:  # which are a part of norms
            torch._foreach_zero_(self._other_grads)
        return self._at.buffers[0].parts

    @property
    def converted(self) -> Sequence[int]:
        """The indices of all entries."""
        return range(len(self.bucket.entries))

    def run(self, grads: Sequence[Tensor | None], some_absent: bool, first_stage: int = 0) -> None:
        """Update the parameters and states in place. No gradient is None.

        If an exception comes between two calls, the others are made before it is raised again: a parameter may lie in
        the parts of several calls.
        """
        runs, after = self._update.runs[:], self.scalar_rows.after(None)
        for views, tensors in self._visitors:
            torch._foreach_copy_(views, tensors)
        saved = [view.clone() for view in self._find_bystanders()]
        try:
            self._update(grads)
            self._finish(after, saved)
        except BaseException:
            if self._update.runs != runs:
                self._update.finish(runs, grads)
                self._finish(after, saved)
            raise
        if self._at.is_visit:
            self._visits += 1
            if self._visits >= VISITS:
                self._memory.movers.update(id(entry.param) for entry in self.bucket.entries)

    def _finish(self, progress: Progress, saved: list[Tensor]) -> None:
        """Copy back what was copied for the update, and count the step. The call can be repeated."""
        for views, tensors in self._visitors:
            torch._foreach_copy_(tensors, views)
        if saved:
            torch._foreach_copy_(self._find_bystanders(), saved)
        self.scalar_rows.write(progress, True)
        self.created = []

    def _find_bystanders(self) -> list[Tensor]:
        """Return the views of parameters and states that lie in the same buffers, but are not in this bucket."""
        if self._bystanders is None:
            home = set() if self._at.is_visit else set(self._at.home.residents())
            buffers = self._at.buffers[1:]
            self._bystanders = [buffer.views[i] for buffer in buffers for i in self._others if i in home]
        return self._bystanders

    def _place(
        self, values: Sequence[dict[str, Any]], initial: Sequence[Mapping[str, float | None]]
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        _, params, *of_states = self._at.buffers
        named = dict(zip(self.bucket.program.kept, of_states, strict=True))
        entries, nonnegative = self.bucket.entries, self.bucket.rule.nonnegative
        if self._at.is_visit:
            self._visitors = [(params.views, [entry.param.detach() for entry in entries])]
            self._visitors += [(buffer.views, [own[name] for own in values]) for name, buffer in named.items()]
            return [own[name] for own in values for name in named], [buffer.parts for buffer in (params, *of_states)]
        places = self._at.views
        for name, buffer in named.items():
            elsewhere = {}
            for i, own, entry, first in zip(places, values, entries, initial, strict=True):
                source = states.source_of(own, name, entry.param, first, self.bucket.rows, nonnegative)
                if not isinstance(source, Tensor):
                    buffer.views[i].fill_(source)
                elif not buffer.holds(i, source):
                    elsewhere[i] = source
            buffer.load(elsewhere)
        at = zip(places, entries, strict=True)
        moved = {i: entry.param for i, entry in at if not params.holds(i, entry.param)}
        params.load(moved)
        # all values are copied before the first tensor is replaced
        self._memory.repoint({param: params.views[i] for i, param in moved.items()})
        kept = []
        for i, own in zip(places, values, strict=True):
            for name, buffer in named.items():
                if own.get(name) is None or not buffer.holds(i, own[name]):
                    own[name] = buffer.views[i].detach()  # an object that user code may point elsewhere
                kept.append(own[name])
            states.drop_other_companions(own, named)
        return kept, [buffer.parts for buffer in (params, *of_states)]

    def _row_arguments(self) -> dict[str, Tensor]:
        place = self.bucket.flat_layout
        if not place.segments:
            return {}
        options: Any = {"dtype": torch.int32, "device": self.bucket.device}
        made = {"row_segments": torch.tensor(place.row_segments(), **options)}
        if place.is_padded:
            sizes = torch.tensor(place.row_sizes(), **options)
            made["mask"] = torch.arange(place.width, **options) < sizes.unsqueeze(1)
        return made
