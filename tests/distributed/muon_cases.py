"""Muon on ranks that hold shards of its matrices. Each function runs on every rank and returns what its test checks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import compiled_optim as co
from compiled_optim.rules.muon import NewtonSchulz
from tests.helpers import gradients, parameters

from .training import STEPS, farthest, model, on_ranks, sharded, train, whole

EXACT = {"ns_dtype": torch.float64}
SHAPES = [(8, 5), (7, 3), (5, 8), (3, 6, 4), (1, 4), (8, 5)]
"""With the fifth, some ranks have an empty shard."""


def fsdp(folder: Path, **options: Any) -> dict[str, Any]:
    """Train with fully_shard, and the same model in one process. Convolutions are flattened, the rest is routed."""
    options = {"lr": 0.02, "adamw_eps": 1e-3, "flatten": True, **EXACT, **options}
    made = sharded()
    optimizer = co.Muon(made, **options)
    on_ranks(made, optimizer)
    alone, ranks = model(), dist.get_world_size()
    train(alone, co.Muon(alone, **options), range(STEPS), range(ranks), ranks)
    kinds = {type(value).__name__ for values in optimizer.state.values() for k, value in values.items() if k != "step"}
    return {
        "distance": farthest(whole(made), whole(alone)),
        "moved": farthest(whole(model()), whole(made)),
        "events": optimizer.explain().events,
        "recompiles": optimizer.explain().recompiles,
        "routes": optimizer.explain().routes,
        "kinds": kinds,
    }


def shards(mesh_shape: tuple[int, ...], placements: list[Any], folder: Path, **options: Any) -> float:
    """Step distributed tensors and plain ones, some of them without a gradient in some steps."""
    mesh = init_device_mesh("cpu", mesh_shape)
    twins = parameters(SHAPES, torch.float64)
    params = [nn.Parameter(distribute_tensor(twin.detach().clone(), mesh, placements)) for twin in twins]

    def groups(some: list[Any]) -> list[dict[str, Any]]:
        stacks = {"params": [p for p in some if p.ndim == 3], "batch_dims": 1, "split": 2}
        return [{"params": [p for p in some if p.ndim == 2]}, stacks]

    optimizer = co.Muon(groups(params), lr=0.1, compile=False, **EXACT, **options)
    reference = co.Muon(groups(twins), lr=0.1, compile=False, **EXACT, **options)
    for step, grads in enumerate(gradients(twins, 4)):
        for i, (param, twin, grad) in enumerate(zip(params, twins, grads, strict=True)):
            is_absent = step == 2 and i % 2
            twin.grad = None if is_absent else grad
            param.grad = None if is_absent else distribute_tensor(grad, mesh, placements)
        optimizer.step()
        reference.step()
    return farthest([param.full_tensor() for param in params], twins)


def owners(folder: Path) -> list[int]:
    """Return the numbers of matrices in the stacks that this rank maps."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = [
        nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(0)])) for shape in SHAPES if len(shape) == 2
    ]
    optimizer = co.Muon(params, compile=False)
    for param in params:
        param.grad = torch.ones_like(param)
    sizes = []
    call = NewtonSchulz.__call__
    with mock.patch.object(NewtonSchulz, "__call__", lambda self, x: (sizes.append(len(x)), call(self, x))[1]):
        optimizer.step()
    return sizes


TWO = {
    "fsdp": fsdp,
    "owners": owners,
    "clipped": partial(fsdp, max_grad_norm=0.1, compile=False),
    "rows": partial(shards, (2,), [Shard(0)]),
    "columns": partial(shards, (2,), [Shard(1)]),
    "replicated": partial(shards, (2,), [Replicate()]),
}
FOUR = {
    "fsdp": partial(fsdp, compile=False),
    "owners": owners,
    "rows": partial(shards, (4,), [Shard(0)]),
    "hybrid": partial(shards, (2, 2), [Replicate(), Shard(0)]),
    "both dimensions": partial(shards, (2, 2), [Shard(0), Shard(1)]),
}
