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
from compiled_optim.engine.sharding import ShardSpec, Splits
from compiled_optim.flat_programs import takes_matrix
from compiled_optim.program import SquaredNormProgram
from compiled_optim.program_checks import sum_stages
from compiled_optim.storage import compute_dtype
from compiled_optim.tensors import sum_dtype
from compiled_optim.update_program import MAX_NORM, Part, Phase, UpdateProgram


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
    parameters of a bucket have the same ones. A bucket has several batches: the norms of its gradients if they are
    clipped, the stages of sums over sharded tensors or over all parameters, the matrices to map, and the update.

    The last two dimensions of its matrices are split over processes as ``splits`` says, if the rule uses that.

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
    splits: Splits = ()
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
    def stages(self) -> tuple[int, ...]:
        """The number of sums over each tensor in each stage, if they are added up over shards or parameters.

        It is 0 for a stage of means over dimensions that are split over shards.
        """
        adds_up = self.shards is not None or self.sums_over_all
        return sum_stages(self.program, 1 + self.rows) if adds_up and self.program.reduces else ()

    @property
    def first_mean(self) -> int:
        """The number of the list with the means of the first stage that computes means."""
        return 2 + len(self.program.kept) + (self.matrix_map is not None)

    @property
    def stages_over_all(self) -> range:
        """The stages of the rule itself, if its sums are over all parameters. Others are of a norm or a mask."""
        last = len(self.stages) - self.program.cautious
        return range(int(MAX_NORM in self.program.scalars), last) if self.sums_over_all else range(0)

    @cached_property
    def stages_before_map(self) -> int:
        """The number of stages before the map of matrices."""
        if self.matrix_map is None or not self.stages:
            return 0
        return len(sum_stages(replace(self.program, part=Part.PREPARE), 1 + self.rows))

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
    def measures(self) -> list[Batch]:
        """The batches that compute the sums of each stage, or that write those of means."""
        return [
            self._update_batch(Phase.MEASURE if sums else Phase.AVERAGE, stage, stage >= self.stages_before_map)
            for stage, sums in enumerate(self.stages)
        ]

    @cached_property
    def prepare(self) -> Batch | None:
        """The batch that writes the matrices to map; None if the rule maps none."""
        if self.matrix_map is None:
            return None
        known = self.stages_before_map
        return self._update_batch(Phase.FINISH if known else Phase.WHOLE, known, is_late=False)

    @cached_property
    def update(self) -> Batch:
        """The batch that updates parameters and states."""
        return self._update_batch(Phase.FINISH if self.stages else Phase.WHOLE, len(self.stages))

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of a rule's sums."""
        return sum_dtype(torch.empty(0, dtype=self.program.dtype, device=self.device))

    def batches(self, clips: bool) -> list[Batch]:
        """Return all batches of a step, in order. ``clips`` adds the norm of the gradients."""
        prepare = [] if self.prepare is None else [self.prepare]
        return [*([self.norm] if clips else []), *self.measures, *prepare, self.update]

    def _update_batch(self, phase: Phase, known: int, is_late: bool = True) -> Batch:
        """Return a batch of the program. It is given the sums of the first ``known`` stages.

        If the rule maps matrices, a batch that ``is_late`` is given the results of the map, another one writes what to
        map.
        """
        part = Part.WHOLE
        if self.matrix_map is not None:
            part = Part.APPLY if is_late else Part.PREPARE
        program = replace(self.program, phase=phase, part=part)
        if phase in (Phase.MEASURE, Phase.AVERAGE):
            program = replace(program, stage=known)
        program = replace(program, segments=self.flat_layout.segments if self.is_flat else 0)
        factors = {"inv_scale": program.unscales, "grad_scale": program.scaled}
        scales = [ArgumentSpec(name, program.dtype, ()) for name, is_used in factors.items() if is_used]
        if self.takes_found_inf:
            scales.append(ArgumentSpec("found_inf", torch.float32, ()))
        totals = []
        if any(self.stages[:known]):
            totals = [ArgumentSpec("totals", self.sum_dtype, (sum(self.stages), len(self.entries)))]
        scalars = ArgumentSpec("scalars", program.dtype, (2 * len(program.scalars),))
        arguments = (scalars, *scales, *totals, *self._row_arguments())
        dtypes = self.dtypes if self.matrix_map is None else (*self.dtypes, self.matrix_map.dtype)
        dtypes = (*dtypes, *(self.sum_dtype for _ in program.means))
        return Batch(self.backend, program, str(self.device), dtypes, self.shapes, arguments, self.is_flat)

    def _row_arguments(self) -> list[ArgumentSpec]:
        """Return the arguments that describe the rows of a flat buffer."""
        if not self.is_flat or not self.flat_layout.segments:
            return []
        (shape,) = self.shapes
        mask = [ArgumentSpec("mask", torch.bool, shape)] if self.flat_layout.is_padded else []
        return [ArgumentSpec("row_segments", torch.int32, shape[:1]), *mask]
