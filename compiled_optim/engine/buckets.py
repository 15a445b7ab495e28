"""Buckets: parameters that are stepped together, and the batches of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from compiled_optim.backends import ArgumentSpec, Backend, Batch
from compiled_optim.engine import layout
from compiled_optim.engine.flat_layout import FlatLayout
from compiled_optim.engine.matrix_map import MatrixCut, MatrixMap
from compiled_optim.engine.rule import Constants, Group, Rule
from compiled_optim.engine.sharding import ShardSpec
from compiled_optim.flat_programs import takes_matrix
from compiled_optim.program import SquaredNormProgram
from compiled_optim.program_checks import count_sums
from compiled_optim.storage import compute_dtype
from compiled_optim.tensors import sum_dtype
from compiled_optim.update_program import Phase, UpdateProgram


@dataclass(slots=True)
class Entry:
    """A parameter to be stepped, its index among all parameters, and the number of its group.

    ``local`` is what this process holds of it: the parameter itself, or its shard. ``grad_dtype`` is the dtype in which
    its gradient is used, ``rows`` the number of dimensions after the first in which the rule sees it, ``steps`` the
    number of steps it has made, and ``numbers`` those that the rule keeps. ``constants`` are those of its shape, and
    ``cut`` its matrices, if the rule maps matrices.
    """

    index: int
    group: int
    param: Tensor
    local: Tensor
    grad_dtype: torch.dtype
    rows: int
    steps: int
    numbers: tuple[float, ...]
    constants: Constants = ()
    cut: MatrixCut | None = None


@dataclass
class Bucket:
    """Parameters that share backend, device, dtypes and options, so that one call can step them.

    Group, step count and numbers select a row of scalars for each parameter. If the backend does not take rows, all
    parameters of a bucket have the same ones. A bucket has up to three batches: the norms of its gradients if they are
    clipped, the sums of a rule over sharded tensors, and the update.

    The tensors of a bucket that ``is_flat`` lie in flat buffers. Its batches have the parts of these buffers. Those of
    one that ``is_outside`` do not, although its backend gets flat buffers.
    """

    rule: Rule
    groups: Sequence[Group]
    backend: Backend
    program: UpdateProgram
    dtypes: tuple[torch.dtype, ...]
    rows: int
    wave: int = 0
    shards: ShardSpec | None = None
    is_flat: bool = False
    is_outside: bool = False
    sums_over_all: bool = False
    matrix_map: MatrixMap | None = None
    entries: list[Entry] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """The device of its parameters."""
        return self.entries[0].local.device

    def kept_dtypes(self, entry: Entry) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the states and companions of an entry. A bucket may have real and complex ones."""
        kept = self.dtypes[2:]
        return tuple(dtype.to_complex() for dtype in kept) if entry.param.is_complex() else kept

    @cached_property
    def group_numbers(self) -> list[int]:
        """The numbers of the groups of its parameters, each once."""
        return list(dict.fromkeys(entry.group for entry in self.entries))

    @cached_property
    def group_members(self) -> Tensor:
        """A row for each group in :attr:`group_numbers`, which is true at the entries of the group."""
        members = [[entry.group == number for entry in self.entries] for number in self.group_numbers]
        return torch.tensor(members, device="cpu").to(self.device)

    @cached_property
    def flat_layout(self) -> FlatLayout:
        """The places of its tensors in flat buffers."""
        sizes = [entry.local.numel() for entry in self.entries]
        if not takes_matrix(self.program, 1 + self.rows):
            return FlatLayout.in_chunks(sizes)
        width = layout.view_shape(self.entries[0].local, True)[1] if self.rows else None
        return FlatLayout.as_matrix(sizes, width)

    @cached_property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """The shapes of the working views of the parameters, or of the parts of a flat buffer."""
        if self.is_flat:
            return self.flat_layout.parts
        return [layout.view_shape(entry.local, self.rows) for entry in self.entries]

    @cached_property
    def sums(self) -> int:
        """The number of sums over each tensor that are added up over shards or parameters; 0 if they are not."""
        adds_up = self.shards is not None or self.sums_over_all
        return count_sums(self.program, 1 + self.rows) if adds_up and self.program.reduces else 0

    @property
    def takes_found_inf(self) -> bool:
        """Whether the update itself skips a step after an overflow."""
        return self.program.unscales and self.backend.skips_on_device

    @cached_property
    def norm(self) -> Batch:
        """The batch that computes the squared norms of the gradients."""
        program = SquaredNormProgram(compute_dtype(self.dtypes[0]))
        shapes = self.shapes
        if self.rows > 1 and self.backend.by_address:
            shapes = [(math.prod(shape),) for shape in shapes]
        return Batch(self.backend, program, str(self.device), self.dtypes[:1], shapes, is_flat=self.is_flat)

    @cached_property
    def measure(self) -> Batch | None:
        """The batch before the update, which computes sums of a rule over sharded tensors, or matrices; or None."""
        if self.matrix_map is not None:
            return self._update_batch(Phase.PREPARE)
        return self._update_batch(Phase.MEASURE) if self.sums else None

    @cached_property
    def update(self) -> Batch:
        """The batch that updates parameters and states."""
        if self.matrix_map is not None:
            return self._update_batch(Phase.APPLY)
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
        program = replace(self.program, phase=phase, segments=self.flat_layout.segments if self.is_flat else 0)
        factors = {"inv_scale": program.unscales, "grad_scale": program.scaled}
        scales = [ArgumentSpec(name, program.dtype, ()) for name, is_used in factors.items() if is_used]
        if self.takes_found_inf:
            scales.append(ArgumentSpec("found_inf", torch.float32, ()))
        scalars = ArgumentSpec("scalars", program.dtype, (2 * len(program.scalars),))
        arguments = (scalars, *scales, *totals, *self._row_arguments())
        dtypes = self.dtypes if self.matrix_map is None else (*self.dtypes, self.matrix_map.dtype)
        return Batch(self.backend, program, str(self.device), dtypes, self.shapes, arguments, self.is_flat)

    def _row_arguments(self) -> list[ArgumentSpec]:
        """Return the arguments that describe the rows of a flat buffer."""
        if not self.is_flat or not self.flat_layout.segments:
            return []
        (shape,) = self.shapes
        mask = [ArgumentSpec("mask", torch.bool, shape)] if self.flat_layout.is_padded else []
        return [ArgumentSpec("row_segments", torch.int32, shape[:1]), *mask]
