"""The model that the ranks train, its training on ranks and in one process, and the distance between the two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import compiled_optim as co
from catalog import CATALOG
from tests.helpers import distance

from .world import warm_up

STEPS = 10


def model() -> nn.Module:
    """Return a model whose rows do not divide evenly among the ranks.

    A normalisation after a layer makes gradients orthogonal to their weights, by channel and by layer.
    """
    torch.manual_seed(0)
    features = [nn.Conv2d(1, 5, 3, bias=False), nn.GroupNorm(5, 5), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(20, 7), nn.LayerNorm(7), nn.Linear(7, 1))


def sharded(mesh: DeviceMesh | None = None) -> nn.Module:
    """Return the model with fully_shard applied to each layer."""
    made = model()
    for layer in made:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(made, mesh=mesh)


def backward(made: nn.Module, step: int, mine: Sequence[int], ranks: int, scale: float = 1.0) -> None:
    """Compute the gradients of the loss on the parts of the batch that belong to the ranks ``mine``.

    The whole batch is the same for any number of ranks.
    """
    batch = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(step))
    for rank in mine:
        (made(batch.chunk(ranks)[rank]).square().mean() * scale / len(mine)).backward()


def train(made: nn.Module, optimizer: torch.optim.Optimizer, steps: range, mine: Sequence[int], ranks: int) -> None:
    for step in steps:
        backward(made, step, mine, ranks)
        optimizer.step()
        optimizer.zero_grad()


def on_ranks(made: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(STEPS)) -> None:
    if isinstance(optimizer, co.Optimizer):
        warm_up(optimizer)
    train(made, optimizer, steps, [dist.get_rank()], dist.get_world_size())


def whole(made: nn.Module) -> list[Tensor]:
    return [param.full_tensor() if isinstance(param, DTensor) else param.detach() for param in made.parameters()]


def farthest(some: list[Tensor], others: list[Tensor]) -> float:
    return max(distance(a, b) for a, b in zip(some, others, strict=True))


def alone(name: str, **options: Any) -> list[Tensor]:
    """Return the parameters after training in one process, which accumulates the gradients of all ranks."""
    made, ranks = model(), dist.get_world_size()
    optimizer = getattr(co, name)(made, **{**CATALOG[name].distributed, **options})
    train(made, optimizer, range(STEPS), range(ranks), ranks)
    return whole(made)
