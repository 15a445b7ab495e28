"""Sorting parameters into batches, and refusing what cannot be stepped, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from compiled_optim import layout, shards, states
from compiled_optim.backends import Backend, Call, Lane, Signature, Unit
from compiled_optim.lists import sum_dtype
from compiled_optim.program import Phase, SquaredNormProgram, TensorLists, UpdateProgram, compute_dtype, count_sums
from compiled_optim.shards import Split

if TYPE_CHECKING:
    from compiled_optim.optimizer import Optimizer


@dataclass(frozen=True)
class Entry:
    """A parameter to be stepped, its place in the flat list of all parameters, and whether it is seen by rows.

    ``local`` is what this process holds of it: all of it, unless it is split.
    """

    index: int
    name: str
    param: Tensor
    local: Tensor
    rows: bool


Tensors = Sequence[Tensor]


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Tensors]:
    """A function that picks the items at these places from a sequence, by a slice if they stand together."""
    together = slice(places[0], places[-1] + 1)
    return itemgetter(together) if list(places) == list(range(together.stop))[together] else itemgetter(*places)


class BoundCall(NamedTuple):
    """One call of a step: its unit and signature, and which of the batch's gradients it takes."""

    unit: Unit
    signature: Signature
    pick: Callable[[Tensors], Tensors]
    call: Call

    def __call__(self, grads: Tensors) -> Tensor | None:
        """Run it on the batch's gradients."""
        return self.call(self.pick(grads))


@dataclass
class BatchSpec:
    """What a batch will be: entries of one group that share backend, device, dtypes, options and step count.

    If they are split over processes and the rule takes sums over each, it is run in two phases.
    """

    group: dict[str, Any]
    backend: Backend
    program: UpdateProgram
    dtypes: tuple[torch.dtype, ...]
    steps: int
    rows: bool
    split: Split | None = None
    entries: list[Entry] = field(default_factory=list)

    @property
    def sums(self) -> int:
        """How many sums over each tensor have to be added up over processes."""
        return count_sums(self.program, self.rank) if self.split is not None and self.program.takes_total else 0

    @property
    def rank(self) -> int:
        """The number of dimensions parameters are viewed in."""
        return 1 + self.rows

    def cut(self) -> list[tuple[Lane, list[int]]]:
        """How the backend cuts this batch into calls."""
        return self.backend.cut(self.shapes())

    def shapes(self) -> list[tuple[int, ...]]:
        """The shape each parameter is viewed in."""
        return [layout.view_shape(entry.local, self.rows) for entry in self.entries]

    def kinds(self, clips: bool) -> list[Callable[[Lane], Signature]]:
        """The signatures of the calls a step makes on one lane, in their order."""
        norm = [self.norm_signature] if clips else []
        measure = [self.measure_signature] if self.sums else []
        return [*norm, *measure, self.signature]

    def signature(self, lane: Lane) -> Signature:
        """The signature of the update on one lane; of its second phase if it has two."""
        if not self.sums:
            return self._update_signature(Phase.WHOLE, lane)
        return self._update_signature(Phase.FINISH, lane, (self.sum_dtype(), (self.sums * lane.width,)))

    def measure_signature(self, lane: Lane) -> Signature:
        """The signature of the first of two phases on one lane."""
        return self._update_signature(Phase.MEASURE, lane)

    def sum_dtype(self) -> torch.dtype:
        """The dtype of a rule's sums."""
        return sum_dtype(torch.empty(0, dtype=compute_dtype(self.dtypes[1]), device=self._device()))

    def norm_signature(self, lane: Lane) -> Signature:
        """The signature of the norm of this batch's gradients on one lane."""
        program = SquaredNormProgram(compute_dtype(self.dtypes[0]))
        return Signature(program, self._device(), self.rank, self.dtypes[:1], (), lane)

    def bind(
        self,
        optimizer: Optimizer,
        signature: Callable[[Lane], Signature],
        lists: TensorLists = (),
        shared: Sequence[Tensor] = (),
        own: Sequence[Tensor] = (),
    ) -> list[BoundCall]:
        """Cut the batch into calls of the signature's unit, everything but the gradients fixed.

        ``shared`` are tensors that all calls take, ``own`` one for each call.
        """
        shapes = self.shapes()
        calls = []
        for number, (lane, places) in enumerate(self.cut()):
            unit = optimizer.obtain(self.backend, signature(lane))
            part = [[tensors[i] for i in places] for tensors in lists]
            call = unit.bind([shapes[i] for i in places], part, [*shared, *own[number : number + 1]])
            calls.append(BoundCall(unit, signature(lane), picker(places), call))
        return calls

    def _update_signature(self, phase: Phase, lane: Lane, *totals: tuple[torch.dtype, tuple[int, ...]]) -> Signature:
        program, dtype = replace(self.program, phase=phase), compute_dtype(self.dtypes[1])
        scales = [(dtype, ())] if program.scaled else []
        shared = ((dtype, (len(program.scalars),)), *scales, *totals)
        return Signature(program, self._device(), self.rank, self.dtypes, shared, lane)

    def _device(self) -> str:
        return str(self.entries[0].local.device)


def collect(optimizer: Optimizer, grads: Sequence[Tensor | None]) -> list[BatchSpec]:
    """Sort the parameters that have a gradient into batches, or raise; nothing is changed either way.

    The gradients are what this process holds of them.
    """
    entries, groups, seen = [], [], set()
    names = optimizer.parameter_names()
    numbered = [(number, param) for number, group in enumerate(optimizer.param_groups) for param in group["params"]]
    for index, (number, param) in enumerate(numbered):
        # torch warns about a parameter listed twice; it is stepped once
        if grads[index] is not None and id(param) not in seen:
            seen.add(id(param))
            rows = optimizer.rowwise and param.ndim > 1
            entries.append(Entry(index, names[index], param, shards.local(param), rows))
            groups.append(number)
    for entry in entries:
        grad = grads[entry.index]
        assert grad is not None
        refuse(type(optimizer).__name__, entry, grad)

    specs: dict[tuple[object, ...], BatchSpec] = {}
    programs = [optimizer.program(group) for group in optimizer.param_groups]
    for entry, number, wave in zip(entries, groups, overlap_waves(entries), strict=True):
        group, program = optimizer.param_groups[number], programs[number]
        known = states.known(optimizer, entry, program.states)
        grad = grads[entry.index]
        assert grad is not None
        used = [layout.paired_dtype(entry.local, grad), entry.param.dtype]
        used += [known.get(name, entry.param).dtype for name in program.states]
        dtypes = tuple(map(layout.real_dtype, used))
        steps = states.steps_taken(optimizer, entry, program.states)
        split = Split.of(entry.param)
        key = (number, entry.local.device, dtypes, steps, wave, entry.rows, split)
        if key not in specs:
            backend = optimizer.backend_for(entry.local.device)
            specs[key] = BatchSpec(group, backend, program, dtypes, steps, entry.rows, split)
        specs[key].entries.append(entry)
    return list(specs.values())


def refuse(optimizer: str, entry: Entry, grad: Tensor) -> None:
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
            f"{name} has no memory: its storage was resized to {param.untyped_storage().nbytes()} bytes; give it back "
            "its memory before the step, or set its .grad to None"
        )
    if layout.overlaps_itself(param):
        raise RuntimeError(
            f"{name} is an expanded tensor with strides {param.stride()}: several of its elements share memory and "
            "cannot be updated in place; clone() it before it becomes a parameter"
        )


def overlap_waves(entries: Sequence[Entry]) -> list[int]:
    """Number parameters that share memory, so that they are updated one after the other, as torch's loop does.

    All others get wave 0. Parameters whose address ranges interleave without sharing an element are told apart too;
    that only costs a call.
    """
    ranges = []
    for i, entry in enumerate(entries):
        param = entry.local
        if param.numel():
            start = param.data_ptr()
            ranges.append((start, start + layout.span(param) * param.element_size(), param.device, i))
    clusters: list[list[int]] = []
    reach: dict[torch.device, int] = {}
    cluster_on: dict[torch.device, list[int]] = {}
    for start, end, device, i in sorted(ranges, key=lambda r: r[:2]):
        if start < reach.get(device, 0):
            cluster_on[device].append(i)
        else:
            cluster_on[device] = [i]
            clusters.append(cluster_on[device])
        reach[device] = max(reach.get(device, 0), end)
    waves = [0] * len(entries)
    for cluster in clusters:
        for wave, i in enumerate(sorted(cluster)):
            waves[i] = wave
    return waves
