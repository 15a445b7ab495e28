"""Find parameters that share memory. They are updated one after the other, as in torch's loop over parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_optim.engine.layout import span
from compiled_optim.engine.tensor_types import has_memory


def overlap_waves(params: Sequence[Tensor]) -> dict[int, int]:
    """Return a wave number for the index of each parameter that shares memory with others: 0, 1, 2 ..., in order.

    Parameters whose address ranges interleave without a common element are numbered too, which costs an extra call. A
    device that keeps its memory outside the storage has no addresses, so nothing is known about its tensors.
    """
    ranges = []
    for i, param in enumerate(params):
        extent = param.numel() if param.is_contiguous() else span(param)
        start = param.data_ptr() if extent and has_memory(param) else 0
        if start:
            ranges.append((start, start + extent * param.element_size(), param.device, i))
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
    shared = [sorted(cluster) for cluster in clusters if len(cluster) > 1]
    return {i: wave for cluster in shared for wave, i in enumerate(cluster)}
