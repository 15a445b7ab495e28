"""Cases of sharded parameters whose states are kept in 8 bits or with compensations.

Random bits are computed from the values of an element, and shards begin at borders of blocks. So training on ranks
gives the bits of training in one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import compiled_optim as co

from .training import STEPS, whole
from .world import warm_up

STORED: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "8-bit": (torch.float32, {"state_dtype": "8bit"}),
    "kahan": (torch.bfloat16, {"rounding": "kahan", "compile": False}),
    "master weights": (torch.bfloat16, {"master_weights": True, "compile": False}),
}


def _model(label: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(256, 96, bias=False).to(STORED[label][0])


def _optimizer(label: str, made: nn.Module) -> co.Optimizer:
    return co.AdamW(made, lr=1e-2, **STORED[label][1])


def _train(made: nn.Module, optimizer: co.Optimizer, steps: range) -> None:
    (param,) = made.parameters()
    for step in steps:
        grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step)).to(param.dtype)
        mesh = getattr(param, "device_mesh", None)
        param.grad = grad if mesh is None else distribute_tensor(grad, mesh, param.placements)
        optimizer.step()


def _alone(label: str) -> list[Tensor]:
    made = _model(label)
    _train(made, _optimizer(label, made), range(STEPS))
    return whole(made)


def _sharded(label: str) -> tuple[nn.Module, co.Optimizer]:
    made = fully_shard(_model(label))
    optimizer = _optimizer(label, made)
    warm_up(optimizer)
    return made, optimizer


def stored(label: str, folder: Path) -> dict[str, Any]:
    """Train on ranks; return whether the result has the bits of one process, and the dtypes of the states."""
    made, optimizer = _sharded(label)
    _train(made, optimizer, range(STEPS))
    (values,) = optimizer.state.values()
    return {
        "equal": all(map(torch.equal, whole(made), _alone(label))),
        "dtypes": {name: str(value.dtype) for name, value in values.items()},
    }


def save_stored(label: str, folder: Path) -> None:
    """Train for half of the steps, then save a checkpoint."""
    made, optimizer = _sharded(label)
    _train(made, optimizer, range(STEPS // 2))
    weights, state = get_state_dict(made, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / f"checkpoint-stored-{label}")
    dist.barrier()


def load_stored(label: str, folder: Path) -> bool:
    """Load the checkpoint on another number of ranks, and train for the other half of the steps."""
    made, optimizer = _sharded(label)
    weights, state = get_state_dict(made, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / f"checkpoint-stored-{label}")
    set_state_dict(made, optimizer, model_state_dict=weights, optim_state_dict=state)
    _train(made, optimizer, range(STEPS // 2, STEPS))
    return all(map(torch.equal, whole(made), _alone(label)))


UNEVEN = (127, 64), (1, 8192), (10,)
"""Of the first, only one shard of two has the elements that 8 bits are for; of the second, one is empty."""


def uneven(folder: Path) -> dict[str, Any]:
    """Train parameters of which one rank holds more, with a norm over all of them; all ranks keep states alike."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole_grads = [torch.full(shape, 0.1) for shape in UNEVEN]
    params = [nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(0)])) for shape in UNEVEN]
    options: dict[str, Any] = {"max_grad_norm": 1.0, "state_dtype": "8bit", "compile": False}
    optimizer = co.AdamW(params, **options)
    buckets = []
    for _ in range(2):
        for param, grad in zip(params, whole_grads, strict=True):
            param.grad = distribute_tensor(grad, mesh, [Shard(0)])
        optimizer.step()
        buckets.append(len(optimizer.explain().batches))
    norm = sum(grad.square().sum() for grad in whole_grads) ** 0.5
    dtypes = [optimizer.state[param]["exp_avg"].dtype for param in params]
    return {"norm": float(optimizer.last_grad_norm), "expected": float(norm), "dtypes": dtypes, "buckets": buckets}
