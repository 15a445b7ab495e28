"""The first of two phases of a rule over parameters that are split: sums over shards become sums over tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compiled_optim.collect import BatchSpec, Tensors
from compiled_optim.program import TensorLists

if TYPE_CHECKING:
    from compiled_optim.optimizer import Optimizer


class Totals:
    """Measures a batch's shards and adds up what all processes measured, in one collective for each mesh dimension.

    How a batch is cut into calls depends on the shards a process has, so sums are sent in the order of the parameters.
    ``of_calls`` has, for each call of the second phase, the tensor it finds its totals in.
    """

    def __init__(self, optimizer: Optimizer, spec: BatchSpec, lists: TensorLists, shared: Sequence[Tensor]) -> None:
        assert spec.split is not None
        self.calls = spec.bind(optimizer, spec.measure_signature, lists, shared)
        self._split = spec.split
        device = spec.entries[0].local.device
        self._sums = torch.zeros(spec.sums, len(spec.entries), dtype=spec.sum_dtype(), device=device)
        cut = spec.cut()
        self._places = [torch.tensor(places, device=device) for _, places in cut]
        self.of_calls = [self._sums.new_zeros(spec.sums * (lane.width or len(places))) for lane, places in cut]

    def run(self, grads: Tensors) -> None:
        """Measure, and put the totals where the calls of the second phase find them."""
        count = len(self._sums)
        self._sums.zero_()
        for call, places in zip(self.calls, self._places, strict=True):
            measured = call(grads)
            assert measured is not None
            self._sums[:, places] = measured.view(count, -1)[:, : len(places)]
        self._split.add_up(self._sums)
        for totals, places in zip(self.of_calls, self._places, strict=True):
            totals.view(count, -1)[:, : len(places)] = self._sums[:, places]
