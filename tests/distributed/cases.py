"""What the ranks do. Each function runs on every rank and returns what its test checks."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import compiled_optim as co
from catalog import CATALOG
from tests.helpers import copies, gradients, parameters

from .backward_cases import averages, in_backward, in_backward_of_ddp
from .shard_cases import columns, refusals, rows
from .stored_cases import STORED, load_stored, save_stored, stored, uneven
from .training import STEPS, alone, backward, farthest, model, on_ranks, sharded, whole
from .world import warm_up

# with the last two, some ranks have an empty shard
SHAPES = [(8, 5), (7, 3), (6,), (5, 2, 3), (4, 6), (1, 4), (1,)]
MATRICES = [(8, 5), (7, 3), (3, 6, 4), (4, 3, 3, 2), (1, 4)]
CAUTIOUS = ("AdamW", "AdamP", "Lamb", "Prodigy")


def fsdp(name: str, folder: Path, **options: Any) -> dict[str, Any]:
    made = sharded()
    optimizer = getattr(co, name)(made, **{**CATALOG[name].distributed, **options})
    on_ranks(made, optimizer)
    explanation = optimizer.explain()
    return {
        "distance": farthest(whole(made), alone(name, **options)),
        "moved": farthest(whole(model()), whole(made)),
        "mode": explanation.mode,
        "recompiles": explanation.recompiles,
        "events": explanation.events,
        "empty": sum(not param.to_local().numel() for param in made.parameters()),
    }


def shards_against_the_formula(name: str, folder: Path, mesh: DeviceMesh | None = None, **options: Any) -> float:
    """Return the distance from the reference; some gradients are orthogonal to their weights."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    twins = parameters(SHAPES)
    params = [nn.Parameter(distribute_tensor(twin.detach(), mesh, placements)) for twin in copies(twins)]
    options = {**CATALOG[name].distributed, **options}
    optimizer = getattr(co, name)(params, **options)
    reference = CATALOG[name].reference(twins, **options)
    warm_up(optimizer)
    for grads in gradients(twins, STEPS):
        with torch.no_grad():
            for place in (0, 3):  # orthogonal row by row
                flat, rows = grads[place].view(len(grads[place]), -1), twins[place].view(len(twins[place]), -1)
                flat -= (flat * rows).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True) * rows
            grads[4] -= (grads[4] * twins[4]).sum() / twins[4].square().sum() * twins[4]  # orthogonal only as a whole
        for param, twin, grad in zip(params, twins, grads, strict=True):
            param.grad, twin.grad = distribute_tensor(grad, mesh, placements), grad
        reference.step()
        optimizer.step()
    return farthest([param.full_tensor() for param in params], twins)


def matrices(mesh_shape: tuple[int, ...], placements: list[Any], folder: Path, **options: Any) -> dict[str, float]:
    """Step Adafactor over matrices that are split in other ways, some without a gradient in some steps.

    Returns the distances of parameters and states from those of torch.optim.
    """
    mesh = init_device_mesh("cpu", mesh_shape)
    dims = [placement.dim for placement in placements if isinstance(placement, Shard)]
    twins = parameters([shape for shape in MATRICES if len(shape) > max(dims)], torch.float64)
    params = [nn.Parameter(distribute_tensor(twin.detach(), mesh, placements)) for twin in copies(twins)]
    optimizer = co.Adafactor(params, lr=0.05, weight_decay=0.1, **options)
    reference = torch.optim.Adafactor(twins, lr=0.05, weight_decay=0.1)
    warm_up(optimizer)
    for step, grads in enumerate(gradients(twins, STEPS)):
        for i, (param, twin, grad) in enumerate(zip(params, twins, grads, strict=True)):
            is_absent = step == 2 and i % 2
            twin.grad = None if is_absent else grad
            param.grad = None if is_absent else distribute_tensor(grad, mesh, placements)
        reference.step()
        optimizer.step()
    pairs = [(optimizer.state[param], reference.state[twin]) for param, twin in zip(params, twins, strict=True)]
    states = [(ours[name], own[name]) for ours, own in pairs for name in ("row_var", "col_var")]
    replicated = [(a.to_local(), b) for a, b in states if all(cut.is_replicate() for cut in a.placements)]
    return {
        "parameters": farthest([param.full_tensor() for param in params], twins),
        "states": farthest([a.full_tensor() for a, _ in states], [b for _, b in states]),
        "replicas": farthest([a for a, _ in replicated], [b for _, b in replicated]) if replicated else 0.0,
    }


def cautious(name: str, folder: Path, **options: Any) -> float:
    """Step shards with a mask, whose sums follow those of the rule, and the same tensors in one process."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    twins = parameters(SHAPES, torch.float64)
    params = [nn.Parameter(distribute_tensor(twin.detach(), mesh, [Shard(0)])) for twin in copies(twins)]
    options = {**CATALOG[name].distributed, "cautious": True, "max_grad_norm_per_parameter": 0.5, **options}
    optimizer, reference = (getattr(co, name)(each, compile=False, **options) for each in (params, twins))
    for grads in gradients(twins, STEPS):
        for param, twin, grad in zip(params, twins, grads, strict=True):
            param.grad, twin.grad = distribute_tensor(grad, mesh, [Shard(0)]), grad
        reference.step()
        optimizer.step()
    return farthest([param.full_tensor() for param in params], twins)


def clipped(folder: Path) -> dict[str, float]:
    made = sharded()
    optimizer = co.SGD([{"params": [p]} for p in made.parameters()], lr=0.1, max_grad_norm=0.01)
    on_ranks(made, optimizer, range(3))
    twin = model()
    reference = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(3):
        backward(twin, step, range(dist.get_world_size()), dist.get_world_size())
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
        reference.step()
        reference.zero_grad()
    assert optimizer.last_grad_norm is not None
    return {"distance": farthest(whole(made), whole(twin)), "norm": (optimizer.last_grad_norm / norm).item()}


def scaled(folder: Path) -> dict[str, Any]:
    """An overflow in one rank's shard skips the step on all ranks. Other steps are the same as without a scaler."""
    made, twin = sharded(), model()
    optimizer, reference = co.AdamW(made, lr=0.01), torch.optim.AdamW(twin.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    ranks = dist.get_world_size()
    scaler.scale(torch.zeros(()))  # the scaler creates its scale at its first use
    for step in range(4):
        backward(made, step, [dist.get_rank()], ranks, scaler.get_scale())
        if step == 1 and dist.get_rank() == 0:
            next(made.parameters()).grad.to_local()[0, 0, 0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step != 1:
            backward(twin, step, range(ranks), ranks)
            reference.step()
            reference.zero_grad()
    return {"distance": farthest(whole(made), whole(twin)), "scale": scaler.get_scale()}


def ddp(name: str, folder: Path) -> dict[str, Any]:
    made = DistributedDataParallel(model())
    optimizer = getattr(co, name)(made, **CATALOG[name].distributed)
    on_ranks(made, optimizer)
    return {"distance": farthest(whole(made), alone(name)), "params": whole(made), "events": optimizer.explain().events}


def zero_redundancy(folder: Path) -> float:
    """Train with ZeroRedundancyOptimizer: each rank steps other parameters."""
    made = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(made.parameters(), optimizer_class=co.AdamW, **CATALOG["AdamW"].distributed)
    on_ranks(made, optimizer)
    return farthest(whole(made), alone("AdamW"))


def hybrid(name: str, folder: Path) -> float:
    made = sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    on_ranks(made, optimizer := getattr(co, name)(made, **CATALOG[name].distributed))
    assert not optimizer.explain().events
    return farthest(whole(made), alone(name))


def hybrid_shards(name: str, folder: Path) -> float:
    return shards_against_the_formula(name, folder, init_device_mesh("cpu", (2, 2)))


def save(name: str, folder: Path) -> None:
    """Train for half of the steps, then save a checkpoint."""
    made = sharded()
    optimizer = getattr(co, name)(made, **CATALOG[name].distributed)
    on_ranks(made, optimizer, range(STEPS // 2))
    weights, state = get_state_dict(made, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / f"checkpoint-{name}")


def load(name: str, folder: Path) -> dict[str, Any]:
    """Load the checkpoint on another number of ranks, then train for the other half of the steps."""
    made = sharded()
    optimizer = getattr(co, name)(made, **CATALOG[name].distributed)
    weights, state = get_state_dict(made, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / f"checkpoint-{name}")
    set_state_dict(made, optimizer, model_state_dict=weights, optim_state_dict=state)
    steps = {int(values["step"]) for values in optimizer.state.values() if "step" in values}
    on_ranks(made, optimizer, range(STEPS // 2, STEPS))
    kinds = {
        type(value).__name__ for values in optimizer.state.values() for key, value in values.items() if key != "step"
    }
    return {"distance": farthest(whole(made), alone(name)), "steps": steps, "kinds": kinds}


def watched(folder: Path) -> dict[str, Any]:
    """FSDP swaps a module's parameters during forward and backward. Only a lasting change of memory is an event."""
    made = sharded()
    optimizer = co.AdamW(made, compile=False)
    same_plan = []
    for step in range(3):
        loss = made(torch.ones(4, 1, 4, 4)).square().mean()
        optimizer.zero_grad()  # while the root's parameters are unsharded
        plan = optimizer._stepper._plan
        loss.backward()
        optimizer.step()
        same_plan.append(step == 0 or optimizer._stepper._plan is plan)
    quiet = optimizer.explain().events
    param = next(made.parameters())
    before = copy.deepcopy(optimizer.state[param])
    param._local_tensor = param._local_tensor.clone()  # as FSDP does when a checkpoint is loaded
    param.grad = torch.zeros_like(param)
    optimizer.step()
    moved = optimizer.explain().events
    kept = torch.equal(before["exp_avg"].to_local() * 0.9, optimizer.state[param]["exp_avg"].to_local())
    return {"quiet": quiet, "moved": moved, "kept": kept, "same plan": all(same_plan)}


SHARDED = tuple(CATALOG)
BY_TENSOR = tuple(name for name in SHARDED if CATALOG[name].sums == "tensor")
SUMS = tuple(name for name in SHARDED if CATALOG[name].sums)
SAVED = ("AdamW", "Lamb", "SGD", "Adafactor")
TWO = {
    **{f"fsdp {name}": partial(fsdp, name) for name in SHARDED},
    **{f"formula {name}": partial(shards_against_the_formula, name) for name in SHARDED},
    **{f"ddp {name}": partial(ddp, name) for name in ("AdamW", *BY_TENSOR)},
    **{f"in backward {name}": partial(in_backward, name) for name in ("AdamW", "Lamb")},
    **{f.__name__: f for f in (clipped, scaled, zero_redundancy, refusals, rows, columns, watched, uneven)},
    **{f.__name__: f for f in (averages, in_backward_of_ddp)},
    **{f"stored {label}": partial(stored, label) for label in STORED},
    **{f"cautious {name}": partial(cautious, name) for name in CAUTIOUS},
    "matrices rows": partial(matrices, (2,), [Shard(0)], compile=False),
    "matrices columns": partial(matrices, (2,), [Shard(1)], compile=False),
    "matrices in stacks": partial(matrices, (2,), [Shard(2)], compile=False),
}
FOUR = {
    **{f"fsdp {name}": partial(fsdp, name) for name in ("AdamW", *BY_TENSOR)},
    **{f"formula {name}": partial(shards_against_the_formula, name) for name in SUMS},
    **{f"hybrid {name}": partial(hybrid, name) for name in ("AdamW", "Lamb")},
    **{f"hybrid shards {name}": partial(hybrid_shards, name) for name in ("AdamP", "BertAdam")},
    **{f"save {name}": partial(save, name) for name in SAVED},
    "matrices both": partial(matrices, (2, 2), [Shard(0), Shard(1)], compile=False),
    "matrices twice": partial(matrices, (2, 2), [Shard(0), Shard(0)], compile=False),
    **{f"save stored {label}": partial(save_stored, label) for label in STORED},
}
RELOADED = {
    **{f"load {name}": partial(load, name) for name in SAVED},
    **{f"load stored {label}": partial(load_stored, label) for label in STORED},
}
