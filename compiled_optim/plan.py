"""The plan of a step: batches bound to compiled calls, rebuilt only when the guard says so.

Between steps only the gradients are read anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compiled_optim import layout, progress, shards, states
from compiled_optim.backends import Backend, Signature
from compiled_optim.clip import Scaling
from compiled_optim.collect import BatchSpec, BoundCall, Tensors, picker
from compiled_optim.guard import Guard
from compiled_optim.program import compute_dtype
from compiled_optim.reallocation import has_memory
from compiled_optim.scalars import Scalars
from compiled_optim.totals import Totals

if TYPE_CHECKING:
    from compiled_optim.optimizer import Optimizer


class Batch:
    """Parameters in lock-step, bound to compiled calls."""

    def __init__(self, optimizer: Optimizer, spec: BatchSpec, grads: Sequence[Tensor | None]) -> None:
        self.spec = spec
        self.params = [entry.local for entry in spec.entries]
        self.steps = spec.steps
        self.counter = states.bind(optimizer, spec.entries, spec.program.states, optimizer.initial_state(spec.group))
        self._counter_version = self.counter._version
        self._pick = picker([entry.index for entry in spec.entries])
        self._views = self._grad_views(self._pick(grads))
        # a scattered parameter is worked on in a dense copy
        self._scratch: list[Tensor] = []
        self._scattered: list[Tensor] = []
        dtype = compute_dtype(spec.dtypes[1])
        self.scalars = Scalars(len(spec.program.scalars), dtype)
        self.grad_scale = torch.full(
            (), -1.0 if spec.group["maximize"] else 1.0, dtype=dtype, device=self.params[0].device
        )
        shared = [self.scalars.tensor, self.grad_scale] if spec.program.scaled else [self.scalars.tensor]
        owners = [optimizer.own_state.get(entry.param, {}) for entry in spec.entries]
        lists = [[shards.local(state[name]) for state in owners] for name in spec.program.states]
        self.states = [state for tensors in lists for state in tensors]
        homes = [[self._home(param) for param in self.params]]
        homes += [[layout.view(state, spec.rows) for state in tensors] for tensors in lists]
        self.totals = Totals(optimizer, spec, homes, shared) if spec.sums else None
        own = self.totals.of_calls if self.totals is not None else ()
        self.calls = spec.bind(optimizer, spec.signature, homes, shared, own)

    def every_call(self) -> list[BoundCall]:
        """The calls of all phases of the update."""
        return [*(self.totals.calls if self.totals is not None else ()), *self.calls]

    def in_step(self) -> bool:
        """Whether the step counter still holds what this batch last wrote there."""
        return self.counter._version == self._counter_version

    def gather(self, grads: Sequence[Tensor | None]) -> Tensors:
        """This step's gradients in the form the units take them."""
        picked = self._pick(grads)
        if not self._views:
            return picked
        gathered = list(picked)
        for place, view in self._views.items():
            gathered[place] = view(gathered[place])
        return gathered

    def prepare(self, optimizer: Optimizer) -> None:
        """Compute the scalars of the coming step."""
        self.scalars.fill(optimizer.scalars(self.spec.group, self.steps + 1).values())

    def run(self, grads: Tensors) -> None:
        """Update the parameters and states in place."""
        for scratch, param in zip(self._scratch, self._scattered, strict=True):
            scratch.copy_(param)
        if self.totals is not None:
            self.totals.run(grads)
        for _, _, pick, call in self.calls:  # what BoundCall does, without a frame for each
            call(pick(grads))
        for scratch, param in zip(self._scratch, self._scattered, strict=True):
            param.copy_(scratch)
        self.steps += 1
        self.counter.fill_(self.steps)
        self._counter_version = self.counter._version

    def _home(self, param: Tensor) -> Tensor:
        """The view in which a parameter is updated: of its own memory, or of a copy if that is scattered."""
        param = param.detach()
        rows = self.spec.rows
        if layout.is_home(param, rows):
            return layout.view(param, rows)
        scratch = layout.like(param, param, rows)
        self._scattered.append(param)
        self._scratch.append(scratch)
        return layout.view(scratch, rows)

    def _grad_views(self, grads: Tensors) -> dict[int, Callable[[Tensor], Tensor]]:
        """How gradients are viewed that are not taken as they are."""
        rows = self.spec.rows
        views: dict[int, Callable[[Tensor], Tensor]] = {}
        for place, (param, grad) in enumerate(zip(self.params, grads, strict=True)):
            dtype = layout.paired_dtype(param, grad)
            if grad.dtype != dtype or not layout.fits(param, grad, rows):
                views[place] = partial(_refitted, param, rows, dtype)
            elif not self.spec.backend.by_address:
                views[place] = partial(layout.view, rows=rows)
        return views


def _refitted(param: Tensor, rows: bool, dtype: torch.dtype, grad: Tensor) -> Tensor:
    return layout.view(layout.like(param, grad, rows, dtype), rows)


def compile_units(optimizer: Optimizer, specs: Sequence[BatchSpec], bar: bool = False) -> None:
    """Compile every unit that stepping these batches needs and that is not known yet; ``bar`` shows how far it is."""
    needed: dict[Signature, Backend] = {}
    for spec in specs:
        kinds = spec.kinds(optimizer.clips_any())
        for lane in dict.fromkeys(lane for lane, _ in spec.cut()):
            needed |= {kind(lane): spec.backend for kind in kinds}
    new = {signature: backend for signature, backend in needed.items() if backend.compiles_anew(signature)}
    with progress.told(type(optimizer).__name__, new, bar) as before:
        for signature, backend in needed.items():
            if signature in new:
                before(signature)
            optimizer.obtain(backend, signature)


class Plan:
    """All batches of an optimizer and the guard over what they were built on."""

    def __init__(
        self,
        optimizer: Optimizer,
        specs: Sequence[BatchSpec],
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
    ) -> None:
        # a compiler that fails must leave no trace in the optimizer's state, so it comes first
        compile_units(optimizer, specs)
        self.scaling = Scaling(optimizer, specs)
        self.batches = [Batch(optimizer, spec, grads) for spec in specs]
        # of a split parameter, the shard and what it is a shard of
        written = [tensor for spec in specs for entry in spec.entries for tensor in (entry.local, entry.param)]
        self._written = list({id(tensor): tensor for tensor in written}.values())
        self._groups = [(group, len(group["params"])) for group in optimizer.param_groups]
        self._variants = optimizer.variants()
        # also parameters without a gradient: wherever one moves, its state has to follow
        bound = list(filter(has_memory, params))
        bound_states = [state for batch in self.batches for state in batch.states]
        self._guard = Guard(params, grads, optimizer.own_state, bound, bound_states)

    def fits(self, optimizer: Optimizer, params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> bool:
        """Whether the plan still describes the optimizer."""
        groups = optimizer.param_groups
        return (
            len(groups) == len(self._groups)
            and all(
                group is old and len(group["params"]) == n for group, (old, n) in zip(groups, self._groups, strict=True)
            )
            and self._guard.holds(params, grads)
            and (not optimizer.state_was_seen or self._guard.state_holds(optimizer.own_state))
            and self._variants == optimizer.variants()
            and all(batch.in_step() for batch in self.batches)
        )

    def run(self, optimizer: Optimizer, grads: Sequence[Tensor | None]) -> None:
        """Make one step."""
        gathered = [batch.gather(grads) for batch in self.batches]
        for batch in self.batches:
            batch.prepare(optimizer)
        optimizer.last_grad_norm = self.scaling.run(optimizer, self.batches, gathered)
        for batch, batch_grads in zip(self.batches, gathered, strict=True):
            batch.run(batch_grads)
        # compiled code writes through pointers: tell autograd, which tracks in-place changes by version
        torch.autograd.graph.increment_version(self._written)
