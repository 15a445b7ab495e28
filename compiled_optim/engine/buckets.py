"""Sort parameters into buckets that are stepped together; raise before any change if one cannot be stepped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from compiled_optim.backends import ArgumentSpec, Backend, Batch
from compiled_optim.engine import layout, states
from compiled_optim.engine.overlaps import overlap_waves
from compiled_optim.engine.rule import Group, Rule
from compiled_optim.engine.sharding import ShardSpec, has_dtensor, local_shard
from compiled_optim.program import Phase, SquaredNormProgram, UpdateProgram, count_sums
from compiled_optim.storage import compute_dtype, storage_for
from compiled_optim.tensors import sum_dtype


@dataclass(frozen=True)
class Entry:
    """A parameter to be stepped, and its index among all parameters.

    ``local`` is what this process holds of it: the parameter itself, or its shard. ``grad_dtype`` is the dtype in which
    its gradient is used.
    """

    index: int
    name: str
    param: Tensor
    local: Tensor
    grad_dtype: torch.dtype
    rows: bool


@dataclass
class Bucket:
    """Parameters of one group that share backend, device, dtypes, options and step count.

    A bucket has up to three batches: the norm of its gradients if they are clipped, the sums of a rule over sharded
    tensors, and the update.
    """

    group: Group
    backend: Backend
    program: UpdateProgram
    dtypes: tuple[torch.dtype, ...]
    steps: int
    rows: bool
    shards: ShardSpec | None = None
    entries: list[Entry] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """The device of its parameters."""
        return self.entries[0].local.device

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of the working view of each parameter."""
        return [layout.view_shape(entry.local, self.rows) for entry in self.entries]

    @cached_property
    def sums(self) -> int:
        """The number of sums over each tensor that are all-reduced; 0 if the tensors are not sharded."""
        return count_sums(self.program, 1 + self.rows) if self.shards is not None and self.program.reduces else 0

    @cached_property
    def norm(self) -> Batch:
        """The batch that computes the squared norm of the gradients."""
        program = SquaredNormProgram(compute_dtype(self.dtypes[0]))
        return Batch(self.backend, program, str(self.device), self.dtypes[:1], self.shapes)

    @cached_property
    def measure(self) -> Batch | None:
        """The batch that computes the sums of a rule over sharded tensors, or None."""
        return self._update_batch(Phase.MEASURE) if self.sums else None

    @cached_property
    def update(self) -> Batch:
        """The batch that updates parameters and states."""
        if not self.sums:
            return self._update_batch(Phase.WHOLE)
        totals = ArgumentSpec("totals", self.sum_dtype, (self.sums, len(self.entries)))
        return self._update_batch(Phase.FINISH, totals)

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of a rule's sums."""
        return sum_dtype(torch.empty(0, dtype=self.program.dtype, device=self.device))

    def batches(self, clips: bool) -> list[Batch]:
        """Return all batches of a step, in order. ``clips`` adds the norm of the gradients."""
        measure = [] if self.measure is None else [self.measure]
        return [*([self.norm] if clips else []), *measure, self.update]

    def _update_batch(self, phase: Phase, *totals: ArgumentSpec) -> Batch:
        program = replace(self.program, phase=phase)
        scale = [ArgumentSpec("grad_scale", program.dtype, ())] if program.scaled else []
        scalars = ArgumentSpec("scalars", program.dtype, (2 * len(program.scalars),))
        return Batch(self.backend, program, str(self.device), self.dtypes, self.shapes, (scalars, *scale, *totals))


def make_buckets(
    rule: Rule,
    groups: Sequence[Group],
    state: states.State,
    grads: Sequence[Tensor | None],
    names: Sequence[str],
    backend_for: Callable[[torch.device], Backend],
    scaled: bool = False,
) -> list[Bucket]:
    """Sort the parameters that have a gradient into buckets; raise if one cannot be stepped. Nothing is changed.

    ``grads`` are local shards, None for a parameter without gradient. ``scaled`` makes programs that multiply gradients
    by a tensor, even in groups that are neither clipped nor maximized.
    """
    optimizer = type(rule).__name__
    entries, owners, seen = [], [], set()
    numbered = [(number, param) for number, group in enumerate(groups) for param in group["params"]]
    is_sharded = has_dtensor([param for _, param in numbered])
    for index, (number, param) in enumerate(numbered):
        grad = grads[index]
        # torch warns about a parameter listed twice; it is stepped once
        if grad is not None and id(param) not in seen:
            seen.add(id(param))
            local = local_shard(param) if is_sharded else param
            dtype, rows = layout.grad_dtype(local, grad), rule.rowwise and param.ndim > 1
            entry = Entry(index, names[index], param, local, dtype, rows)
            check_can_step(optimizer, entry, grad)
            entries.append(entry)
            owners.append(number)

    buckets: dict[tuple[object, ...], Bucket] = {}
    programs = [rule.program(group, scaled) for group in groups]
    for entry, number, wave in zip(entries, owners, overlap_waves([e.local for e in entries]), strict=True):
        program = programs[number]
        existing = states.existing_states(state, entry.param, entry.name, program.states)
        kept = [existing.get(name, entry.param).dtype for name in program.states]
        dtypes = (entry.grad_dtype, entry.param.dtype, *kept)
        if entry.param.is_complex():
            dtypes = tuple(map(layout.real_dtype, dtypes))
        steps = states.steps_taken(entry.name, state.get(entry.param, {}), rule.counts_steps, program.states)
        shards = ShardSpec.from_tensor(entry.param) if is_sharded else None
        key = (number, entry.local.device, dtypes, steps, wave, entry.rows, shards)
        if key not in buckets:
            backend = backend_for(entry.local.device)
            stored = with_storages(program, dtypes[1:])
            buckets[key] = Bucket(groups[number], backend, stored, dtypes, steps, entry.rows, shards)
        buckets[key].entries.append(entry)
    return list(buckets.values())


def with_storages(program: UpdateProgram, kept: Sequence[torch.dtype]) -> UpdateProgram:
    """Return the program for parameters and states in these dtypes."""
    dtype = compute_dtype(kept[0])
    return replace(program, dtype=dtype, storages=tuple(storage_for(each, dtype) for each in kept))


def check_can_step(optimizer: str, entry: Entry, grad: Tensor) -> None:
    """Raise if this parameter cannot be stepped with this gradient."""
    param, name = entry.local, entry.name
    if grad.layout != torch.strided:
        raise RuntimeError(f"{optimizer} does not support sparse gradients, please consider SparseAdam instead")
    if param.layout != torch.strided:
        raise RuntimeError(f"{optimizer} does not support sparse parameters, but {name} has layout {param.layout}")
    if grad.shape != param.shape:
        raise RuntimeError(
            f"the gradient of {name} has shape {tuple(grad.shape)}, but the parameter has {tuple(param.shape)}; "
            "set its .grad to None and run backward() again"
        )
    if grad.device != param.device:
        raise RuntimeError(
            f"the gradient of {name} is on {grad.device}, but the parameter is on {param.device}; "
            "move both, or set its .grad to None and run backward() again"
        )
    if grad.is_complex() and not param.is_complex():
        raise RuntimeError(f"the gradient of {name} is {grad.dtype}, but the parameter is real ({param.dtype})")
    if layout.is_freed(param):
        raise RuntimeError(
            f"{name} has no memory: its storage was resized to {param.untyped_storage().nbytes()} bytes; restore its "
            "memory before the step, or set its .grad to None"
        )
    if layout.is_expanded(param):
        raise RuntimeError(
            f"{name} is an expanded tensor with strides {param.stride()}: several of its elements share memory and "
            "cannot be updated in place; clone() it before it becomes a parameter"
        )
