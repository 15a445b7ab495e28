"""Sorting parameters into batches, and refusing what cannot be stepped, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from compiled_optim import layout, states
from compiled_optim.backends import Backend, Call, Lane, Signature, Unit
from compiled_optim.program import SquaredNormProgram, TensorLists, UpdateProgram, compute_dtype

if TYPE_CHECKING:
    from compiled_optim.optimizer import Optimizer


@dataclass(frozen=True)
class Entry:
    """A parameter to be stepped, its place in the flat list of all parameters, and whether it is seen by rows."""

    index: int
    name: str
    param: Tensor
    rows: bool


class BoundCall(NamedTuple):
    """One call of a step: its unit and signature, and which of the batch's tensors it takes."""

    unit: Unit
    signature: Signature
    places: list[int]
    call: Call

    def __call__(self, grads: Sequence[Tensor]) -> Tensor | None:
        """Run it on the batch's gradients."""
        return self.call([grads[i] for i in self.places])


@dataclass
class BatchSpec:
    """What a batch will be: entries of one group that share backend, device, dtypes, options and step count."""

    group: dict[str, Any]
    backend: Backend
    program: UpdateProgram
    dtypes: tuple[torch.dtype, ...]
    steps: int
    rows: bool
    entries: list[Entry] = field(default_factory=list)

    def cut(self) -> list[tuple[Lane, list[int]]]:
        """How the backend cuts this batch into calls."""
        return self.backend.cut(self.shapes())

    def shapes(self) -> list[tuple[int, ...]]:
        """The shape each parameter is viewed in."""
        return [layout.view_shape(entry.param, self.rows) for entry in self.entries]

    def signature(self, lane: Lane) -> Signature:
        """The signature of the update on one lane."""
        dtype = compute_dtype(self.dtypes[1])
        shared: list[tuple[torch.dtype, tuple[int, ...]]] = [(dtype, (len(self.program.scalars),))]
        if self.program.scaled:
            shared.append((dtype, ()))
        return Signature(self.program, self._device(), 1 + self.rows, self.dtypes, tuple(shared), lane)

    def norm_signature(self, lane: Lane) -> Signature:
        """The signature of the norm of this batch's gradients on one lane."""
        program = SquaredNormProgram(compute_dtype(self.dtypes[0]))
        return Signature(program, self._device(), 1 + self.rows, self.dtypes[:1], (), lane)

    def bind(
        self,
        optimizer: Optimizer,
        signature: Callable[[Lane], Signature],
        lists: TensorLists = (),
        shared: Sequence[Tensor] = (),
    ) -> list[BoundCall]:
        """Cut the batch into calls of the signature's unit, everything but the gradients fixed."""
        shapes = self.shapes()
        calls = []
        for lane, places in self.cut():
            unit = optimizer.obtain(self.backend, signature(lane))
            part = [[tensors[i] for i in places] for tensors in lists]
            calls.append(BoundCall(unit, signature(lane), places, unit.bind([shapes[i] for i in places], part, shared)))
        return calls

    def _device(self) -> str:
        return str(self.entries[0].param.device)


def collect(optimizer: Optimizer, grads: Sequence[Tensor | None]) -> list[BatchSpec]:
    """Sort the parameters that have a gradient into batches, or raise; nothing is changed either way."""
    entries, groups, seen = [], [], set()
    index = 0
    for number, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            # torch warns about a parameter listed twice; it is stepped once
            if grads[index] is not None and id(param) not in seen:
                seen.add(id(param))
                rows = optimizer.rowwise and param.ndim > 1
                entries.append(Entry(index, describe(group, number, position), param, rows))
                groups.append(number)
            index += 1
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
        used = [layout.paired_dtype(entry.param, grad), entry.param.dtype]
        used += [known.get(name, entry.param).dtype for name in program.states]
        dtypes = tuple(map(layout.real_dtype, used))
        steps = states.steps_taken(optimizer, entry, program.states)
        key = (number, entry.param.device, dtypes, steps, wave, entry.rows)
        if key not in specs:
            backend = optimizer.backend_for(entry.param.device)
            specs[key] = BatchSpec(group, backend, program, dtypes, steps, entry.rows)
        specs[key].entries.append(entry)
    return list(specs.values())


def refuse(optimizer: str, entry: Entry, grad: Tensor) -> None:
    """Raise if this parameter cannot be stepped with this gradient."""
    param, name = entry.param, entry.name
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
    if layout.overlaps_itself(param):
        raise RuntimeError(
            f"{name} is an expanded tensor with strides {param.stride()}: several of its elements share memory and "
            "cannot be updated in place; clone() it before it becomes a parameter"
        )


def describe(group: dict[str, Any], number: int, position: int) -> str:
    """How messages name a parameter: by its name if known, else by group and index."""
    names = group.get("param_names", ())
    if len(names) == len(group["params"]):  # else the list was edited, and the names are no longer theirs
        return f"parameter {names[position]!r}"
    return f"parameter {position} of group {number}"


def overlap_waves(entries: Sequence[Entry]) -> list[int]:
    """Number parameters that share memory, so that they are updated one after the other, as torch's loop does.

    All others get wave 0. Parameters whose address ranges interleave without sharing an element are told apart too;
    that only costs a call.
    """
    ranges = []
    for i, entry in enumerate(entries):
        param = entry.param
        if param.numel():
            last = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
            ranges.append((param.data_ptr(), param.data_ptr() + (last + 1) * param.element_size(), param.device, i))
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
