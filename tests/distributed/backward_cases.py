"""What the ranks do with ``in_backward=True`` and with ``ema_decay``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import compiled_optim as co
from catalog import CATALOG

from .training import STEPS, alone, farthest, model, on_ranks, sharded, train, whole


def in_backward(name: str, folder: Path) -> dict[str, Any]:
    """Step shards during backward, after FSDP has reduced their gradients."""
    made = sharded()
    optimizer = getattr(co, name)(made, **CATALOG[name].distributed, in_backward=True)
    on_ranks(made, optimizer)
    return {
        "distance": farthest(whole(made), alone(name)),
        "freed": all(param.grad is None for param in made.parameters()),
        "events": optimizer.explain().events,
    }


def averages(folder: Path) -> dict[str, Any]:
    """Average sharded weights; the reference is torch's AveragedModel in one process, which steps all gradients."""
    made, twin = sharded(), model()
    options = CATALOG["AdamW"].distributed
    optimizer, reference = co.AdamW(made, **options, ema_decay=0.9), torch.optim.AdamW(twin.parameters(), **options)
    average = AveragedModel(twin, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    ranks = dist.get_world_size()
    for step in range(STEPS):
        train(made, optimizer, range(step, step + 1), [dist.get_rank()], ranks)
        train(twin, reference, range(step, step + 1), range(ranks), ranks)
        average.update_parameters(twin)
    weights = whole(made)
    with optimizer.ema():
        inside = farthest(whole(made), whole(average.module))
    saved = [tensor.full_tensor() for tensor in optimizer.ema_state_dict().values()]
    return {
        "inside": inside,
        "saved": farthest(saved, whole(average.module)),
        "restored": farthest(whole(made), weights),
    }


def in_backward_of_ddp(folder: Path) -> str:
    """DDP averages gradients after the hooks of parameters, so the first gradient is refused."""
    made = DistributedDataParallel(model())
    before = whole(model())
    optimizer = co.SGD(made.parameters(), in_backward=True)  # without a reference it would be gone before backward
    try:
        made(torch.ones(2, 1, 4, 4)).sum().backward()
    except RuntimeError as error:
        assert not optimizer.state
        assert farthest(whole(made), before) == 0
        return str(error)
    return ""
