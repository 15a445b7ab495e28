"""What the ranks do with ``in_backward=True``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import compiled_optim as co
from catalog import CATALOG

from .training import alone, farthest, model, on_ranks, sharded, whole


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


def in_backward_of_ddp(folder: Path) -> str:
    """DDP averages gradients after the hooks of parameters, so the first gradient is refused."""
    made = DistributedDataParallel(model())
    before = whole(model())
    co.SGD(made.parameters(), in_backward=True)
    try:
        made(torch.ones(2, 1, 4, 4)).sum().backward()
    except RuntimeError as error:
        assert farthest(whole(made), before) == 0
        return str(error)
    return ""
