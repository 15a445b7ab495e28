"""From parameter groups to calls: the plan of a step, rebuilt only when the guard says so.

``survey`` sorts the parameters that have a gradient into batches and refuses what cannot be stepped, before anything
is changed. ``Plan`` binds the batches to compiled units. Between steps only the gradients are read anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiled_optim import layout, states
from compiled_optim.backends import Backend, Lane, Signature
from compiled_optim.clip import Clipping
from compiled_optim.guard import Guard
from compiled_optim.program import SquaredNormProgram, UpdateProgram, compute_dtype
from compiled_optim.scalars import Scalars

if TYPE_CHECKING:
    from compiled_optim.optimizer import Optimizer


@dataclass(frozen=True)
class Entry:
    """A parameter to be stepped, its place in the flat list of all parameters, and whether it is seen by rows."""

    index: int
    name: str
    param: Tensor
    rows: bool


@dataclass
class Survey:
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
        return self.backend.cut([math.prod(shape) for shape in self.shapes()])

    def shapes(self) -> list[tuple[int, ...]]:
        """The shape each parameter is viewed in."""
        return [layout.view_shape(entry.param, self.rows) for entry in self.entries]

    def signature(self, lane: Lane) -> Signature:
        """The signature of the update on one lane."""
        dtype = compute_dtype(self.dtypes[1])
        shared: list[tuple[torch.dtype, tuple[int, ...]]] = [(dtype, (len(self.program.scalars),))]
        if self.program.scaled:
            shared.append((dtype, ()))
        return Signature(self.program, self._device_type(), 1 + self.rows, self.dtypes, tuple(shared), lane)

    def norm_signature(self, lane: Lane) -> Signature:
        """The signature of the norm of this batch's gradients on one lane."""
        program = SquaredNormProgram(compute_dtype(self.dtypes[0]))
        return Signature(program, self._device_type(), 1 + self.rows, self.dtypes[:1], (), lane)

    def _device_type(self) -> str:
        return self.entries[0].param.device.type


def survey(optimizer: Optimizer, grads: Sequence[Tensor | None]) -> list[Survey]:
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

    surveys: dict[tuple[object, ...], Survey] = {}
    programs = [optimizer.program(group) for group in optimizer.param_groups]
    for entry, number, wave in zip(entries, groups, overlap_waves(entries), strict=True):
        group, program = optimizer.param_groups[number], programs[number]
        known = states.known(optimizer, entry, program.states)
        dtype = layout.real_dtype(entry.param)
        dtypes = (dtype, dtype, *(layout.real_dtype(known.get(name, entry.param)) for name in program.states))
        steps = states.steps_taken(optimizer, entry, program.states)
        key = (number, entry.param.device, dtypes, steps, wave, entry.rows)
        if key not in surveys:
            backend = optimizer.backend_for(entry.param.device)
            surveys[key] = Survey(group, backend, program, dtypes, steps, entry.rows)
        surveys[key].entries.append(entry)
    return list(surveys.values())


def compile_units(optimizer: Optimizer, surveys: Sequence[Survey]) -> None:
    """Compile every unit that stepping these batches needs and that is not known yet."""
    for plan in surveys:
        for lane in dict.fromkeys(lane for lane, _ in plan.cut()):
            optimizer.obtain(plan.backend, plan.signature(lane))
            if optimizer.clips_any():
                optimizer.obtain(plan.backend, plan.norm_signature(lane))


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
    if "param_names" in group:
        return f"parameter {group['param_names'][position]!r}"
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


class Batch:
    """Parameters in lock-step, bound to compiled calls."""

    def __init__(self, optimizer: Optimizer, plan: Survey, grads: Sequence[Tensor | None]) -> None:
        self.survey = plan
        self.params = [entry.param for entry in plan.entries]
        self.steps = plan.steps
        self.counter = states.bind(optimizer, plan.entries, plan.program.states, optimizer.initial_state(plan.group))
        self._counter_version = self.counter._version
        self._indices = [entry.index for entry in plan.entries]
        self._views = self._grad_views(grads)
        # a scattered parameter is worked on in a dense copy
        self._scratch: list[Tensor] = []
        self._scattered: list[Tensor] = []
        dtype = compute_dtype(plan.dtypes[1])
        self.scalars = Scalars(len(plan.program.scalars), dtype)
        self.grad_scale = torch.full((), -1.0 if plan.group["maximize"] else 1.0, dtype=dtype, device="cpu")
        shared = [self.scalars.tensor, self.grad_scale] if plan.program.scaled else [self.scalars.tensor]
        homes = [[self._home(param) for param in self.params]]
        for name in plan.program.states:
            homes.append([layout.view(optimizer.state[param][name], plan.rows) for param in self.params])
        shapes = plan.shapes()
        self.cuts = plan.cut()
        self.units = [optimizer.obtain(plan.backend, plan.signature(lane)) for lane, _ in self.cuts]
        self._calls = [
            unit.bind([shapes[i] for i in places], [[home[i] for i in places] for home in homes], shared)
            for unit, (_, places) in zip(self.units, self.cuts, strict=True)
        ]

    def in_step(self) -> bool:
        """Whether the step counter still holds what this batch last wrote there."""
        return self.counter._version == self._counter_version

    def flatten(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """This step's gradients in the views the programs work on."""
        if self._views is None:
            return [grads[i].view(-1) for i in self._indices]  # type: ignore[union-attr]
        return [view(grads[i]) for view, i in zip(self._views, self._indices, strict=True)]

    def advance(self, optimizer: Optimizer) -> None:
        """Count the step and compute its scalars."""
        self.steps += 1
        self.scalars.fill(optimizer.scalars(self.survey.group, self.steps).values())

    def run(self, flats: list[Tensor]) -> None:
        """Update the parameters and states in place."""
        if self._scattered:
            torch._foreach_copy_(self._scratch, self._scattered)
        for call, (_, places) in zip(self._calls, self.cuts, strict=True):
            call([flats[i] for i in places])
        if self._scattered:
            torch._foreach_copy_(self._scattered, self._scratch)
        self.counter.fill_(self.steps)
        self._counter_version = self.counter._version

    def _home(self, param: Tensor) -> Tensor:
        """The view in which a parameter is updated: of its own memory, or of a copy if that is scattered."""
        param = param.detach()
        rows = self.survey.rows
        if layout.is_home(param, rows):
            return layout.view(param, rows)
        scratch = layout.like(param, param, rows)
        self._scattered.append(param)
        self._scratch.append(scratch)
        return layout.view(scratch, rows)

    def _grad_views(self, grads: Sequence[Tensor | None]) -> list[Callable[[Any], Tensor]] | None:
        """How each gradient is viewed; None if they all are plain contiguous memory to be seen as 1-D."""
        rows = self.survey.rows
        views: list[Callable[[Any], Tensor]] = []
        plain = not rows
        for param, i in zip(self.params, self._indices, strict=True):
            grad = grads[i]
            assert grad is not None
            fits = grad.dtype == param.dtype and layout.fits(param, grad, rows)
            plain = plain and fits and grad.is_contiguous() and not grad.is_complex()
            views.append(partial(layout.view, rows=rows) if fits else partial(_refitted, param, rows))
        return None if plain else views


def _refitted(param: Tensor, rows: bool, grad: Tensor) -> Tensor:
    return layout.view(layout.like(param, grad, rows, dtype=param.dtype), rows)


class Plan:
    """All batches of an optimizer and the guard over what they were built on."""

    def __init__(
        self,
        optimizer: Optimizer,
        surveys: Sequence[Survey],
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
    ) -> None:
        # a compiler that fails must leave no trace in the optimizer's state, so it comes first
        compile_units(optimizer, surveys)
        self.clipping = Clipping(optimizer, surveys) if optimizer.clips_any() else None
        self.batches = [Batch(optimizer, plan, grads) for plan in surveys]
        self._written = [param for batch in self.batches for param in batch.params]
        self._variants = optimizer.variants()
        self.guard = Guard(params, grads, optimizer.state)

    def fits(self, optimizer: Optimizer, params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> bool:
        """Whether the plan still describes the optimizer."""
        return (
            self.guard.holds(params, grads, optimizer.state)
            and self._variants == optimizer.variants()
            and all(batch.in_step() for batch in self.batches)
        )

    def run(self, optimizer: Optimizer, grads: Sequence[Tensor | None]) -> None:
        """Make one step."""
        flats = [batch.flatten(grads) for batch in self.batches]
        for batch in self.batches:
            batch.advance(optimizer)
        if self.clipping is not None:
            optimizer.last_grad_norm = self.clipping.run(optimizer, self.batches, flats)
        for batch, batch_flats in zip(self.batches, flats, strict=True):
            batch.run(batch_flats)
        # compiled code writes through pointers: tell autograd, which tracks in-place changes by version
        torch.autograd.graph.increment_version(self._written)
