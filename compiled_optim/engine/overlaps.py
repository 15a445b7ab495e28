"""Parameters that share memory: they are updated one after the other, as torch's loop over parameters does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_optim.engine.layout import span


def overlap_waves(params: Sequence[Tensor]) -> list[int]:
    """Number parameters that share memory 0, 1, 2 ... in their order; all others get 0.

    Parameters whose address ranges interleave without sharing an element are numbered too; that only costs a call.
    """
    ranges = []
    for i, param in enumerate(params):
        if param.numel():
            start = param.data_ptr()
            ranges.append((start, start + span(param) * param.element_size(), param.device, i))
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
    waves = [0] * len(params)
    for cluster in clusters:
        for wave, i in enumerate(sorted(cluster)):
            waves[i] = wave
    return waves
