"""Cases of single tensors split over the ranks: by rows, by columns, and in ways that are refused.

Each function runs on every rank and returns what its test checks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import compiled_optim as co
from catalog import CATALOG
from tests.helpers import gradients, parameters

from .training import farthest


class Whitened(co.Optimizer):
    """A rule that mixes the elements of a tensor, but neither sets rowwise nor calls all_reduce."""

    counts_steps = False

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "maximize": False}, compile=False)

    @staticmethod
    def update(params: Any, grads: Any, *, lr: Tensor) -> None:
        for param, grad in zip(params, grads, strict=True):
            param.sub_(lr * grad / grad.norm())


class WhitenedRows(Whitened):
    """A rowwise rule that mixes the rows of a tensor without all_reduce."""

    rowwise = True

    @staticmethod
    def update(params: Any, grads: Any, *, lr: Tensor) -> None:
        for param, grad in zip(params, grads, strict=True):
            param.sub_(lr * (grad / grad.norm() if grad.ndim > 1 else grad))


class WhitenedMatrices(Whitened):
    """A rule that sees matrices, and computes with whole ones."""

    matrices = True


class Normalised(Whitened):
    """A rowwise rule that uses each row by itself, so that shards of whole rows are enough."""

    rowwise = True

    @staticmethod
    def update(params: Any, grads: Any, *, lr: Tensor) -> None:
        for param, grad in zip(params, grads, strict=True):
            param.sub_(lr * grad / grad.abs().sum(-1, keepdim=True))


def rows(folder: Path) -> list[float]:
    """A rowwise rule needs no all_reduce if each shard has whole rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.arange(1.0, 9.0).view(4, 2), mesh, [Shard(0)])
    Normalised([param]).step()
    values: list[float] = param.full_tensor().sum(1).tolist()
    return values


def refusals(folder: Path) -> dict[str, str]:
    """Return the error message for each kind of parameter, rule or state that is refused."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def param(placement: Any) -> nn.Parameter:
        if isinstance(placement, Partial):
            return nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [placement]))
        return nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [placement]))

    def mixed() -> None:
        optimizer = co.SGD([("weight", plain := nn.Parameter(torch.ones(4, 4)))], compile=False)
        plain.grad = torch.ones(4, 4)
        optimizer.step()
        other = param(Shard(0))
        other.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        stateful = co.AdamW([("weight", other)], compile=False)
        stateful.state[other]["exp_avg"] = torch.zeros(4, 4)
        stateful.step()

    def placed_otherwise() -> None:
        other = param(Shard(0))
        optimizer = co.AdamW([("weight", other)], compile=False)
        other.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        optimizer.step()
        saved = optimizer.state_dict()
        saved["state"][0]["exp_avg"] = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
        optimizer.load_state_dict(saved)

    attempts = {
        "rows cut": lambda: co.AdamP([("weight", param(Shard(1)))]),
        "matrices cut": lambda: WhitenedMatrices([("weight", param(Shard(0)))]),
        "partial": lambda: co.AdamW([("weight", param(Partial()))]),
        "no all_reduce": lambda: Whitened([("weight", param(Shard(0)))]),
        "no all_reduce, by rows": lambda: WhitenedRows([("weight", param(Shard(0)))]),
        "state not split": mixed,
        "state split otherwise": placed_otherwise,
    }
    answers = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            answers[name] = "nothing was raised"
        except (ValueError, TypeError) as error:
            answers[name] = str(error)
    return answers


def columns(folder: Path) -> float:
    """Step Lamb on a tensor sharded by columns, as in tensor parallelism, with gradients that are Partial."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    twin = nn.Parameter(parameters([(4, 6)])[0].detach())
    param = nn.Parameter(distribute_tensor(twin.detach().clone(), mesh, [Shard(1)]))
    optimizer = co.Lamb([param], **CATALOG["Lamb"].distributed, compile=False)
    reference = CATALOG["Lamb"].reference([twin], **CATALOG["Lamb"].distributed)
    for (grad,) in gradients([twin], 3):
        twin.grad = grad
        param.grad = DTensor.from_local(grad / dist.get_world_size(), mesh, [Partial()])
        optimizer.step()
        reference.step()
    return farthest([param.full_tensor()], [twin])
