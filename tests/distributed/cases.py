"""What the ranks do; each function runs on all of them, and returns what its test looks at."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import compiled_optim as co
from catalog import CATALOG
from tests.helpers import copies, distance, gradients, parameters

from .world import warm_up

STEPS = 10

# the last two leave some ranks without a row
SHAPES = [(8, 5), (7, 3), (6,), (5, 2, 3), (4, 6), (1, 4), (1,)]


def model() -> nn.Module:
    """Weights before a normalisation, whose gradients are orthogonal to them by channel and by layer; uneven rows."""
    torch.manual_seed(0)
    features = [nn.Conv2d(1, 5, 3, bias=False), nn.GroupNorm(5, 5), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(20, 7), nn.LayerNorm(7), nn.Linear(7, 1))


def sharded(mesh: DeviceMesh | None = None) -> nn.Module:
    """The model, sharded layer by layer."""
    made = model()
    for layer in made:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(made, mesh=mesh)


def backward(made: nn.Module, step: int, mine: Sequence[int], ranks: int, scale: float = 1.0) -> None:
    """Gradients of the loss on some ranks' shares of a batch that is the same for any number of ranks."""
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
    """The parameters after training in one process, which adds up the gradients of all shares."""
    made, ranks = model(), dist.get_world_size()
    optimizer = getattr(co, name)(made, **{**CATALOG[name].distributed, **options})
    train(made, optimizer, range(STEPS), range(ranks), ranks)
    return whole(made)


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
    """Return the distance from the reference, for gradients of which some are orthogonal to their weights."""
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
            for place in (0, 3):  # row by row
                flat, rows = grads[place].view(len(grads[place]), -1), twins[place].view(len(twins[place]), -1)
                flat -= (flat * rows).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True) * rows
            grads[4] -= (grads[4] * twins[4]).sum() / twins[4].square().sum() * twins[4]  # only as a whole
        for param, twin, grad in zip(params, twins, grads, strict=True):
            param.grad, twin.grad = distribute_tensor(grad, mesh, placements), grad
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
    """An overflow in the shard of one rank skips the step on all; other steps equal those without a scaler."""
    made, twin = sharded(), model()
    optimizer, reference = co.AdamW(made, lr=0.01), torch.optim.AdamW(twin.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    ranks = dist.get_world_size()
    scaler.scale(torch.zeros(()))  # the scaler makes its scale when it is first used
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
    """Each rank's part of the optimizer steps parameters of its own."""
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
    """Half of the training, saved."""
    made = sharded()
    optimizer = getattr(co, name)(made, **CATALOG[name].distributed)
    on_ranks(made, optimizer, range(STEPS // 2))
    weights, state = get_state_dict(made, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / f"checkpoint-{name}")


def load(name: str, folder: Path) -> dict[str, Any]:
    """The other half, on another number of ranks."""
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


class Whitened(co.Optimizer):
    """A rule that mixes the elements of a tensor without saying so."""

    counts_steps = False

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "maximize": False}, compile=False)

    @staticmethod
    def update(params: Any, grads: Any, *, lr: Tensor) -> None:
        for param, grad in zip(params, grads, strict=True):
            param.sub_(lr * grad / grad.norm())


class WhitenedRows(Whitened):
    """The same by rows, and only there."""

    rowwise = True

    @staticmethod
    def update(params: Any, grads: Any, *, lr: Tensor) -> None:
        for param, grad in zip(params, grads, strict=True):
            param.sub_(lr * (grad / grad.norm() if grad.ndim > 1 else grad))


class Normalised(Whitened):
    """Looks at rows one by one, so that shards of whole rows are enough."""

    rowwise = True

    @staticmethod
    def update(params: Any, grads: Any, *, lr: Tensor) -> None:
        for param, grad in zip(params, grads, strict=True):
            param.sub_(lr * grad / grad.abs().sum(-1, keepdim=True))


def rows(folder: Path) -> list[float]:
    """A rule by rows needs no all_reduce where shards are of whole rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.arange(1.0, 9.0).view(4, 2), mesh, [Shard(0)])
    Normalised([param]).step()
    values: list[float] = param.full_tensor().sum(1).tolist()
    return values


def refusals(folder: Path) -> dict[str, str]:
    """What is refused, and how."""
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
    """Lamb over columns, as tensor parallelism cuts, and gradients that are still to be added up over ranks."""
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


def watched(folder: Path) -> dict[str, Any]:
    """FSDP swaps a module's parameters during forward and backward; only what moved for good is an event."""
    made = sharded()
    optimizer = co.AdamW(made, compile=False)
    same_plan = []
    for step in range(3):
        loss = made(torch.ones(4, 1, 4, 4)).square().mean()
        optimizer.zero_grad()  # while the root's parameters are whole
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


BY_TENSOR = tuple(name for name, entry in CATALOG.items() if entry.sums == "tensor")
SUMS = tuple(name for name, entry in CATALOG.items() if entry.sums)
TWO = {
    **{f"fsdp {name}": partial(fsdp, name) for name in CATALOG},
    **{f"formula {name}": partial(shards_against_the_formula, name) for name in CATALOG},
    **{f"ddp {name}": partial(ddp, name) for name in ("AdamW", *BY_TENSOR)},
    **{f.__name__: f for f in (clipped, scaled, zero_redundancy, refusals, rows, columns, watched)},
}
FOUR = {
    **{f"fsdp {name}": partial(fsdp, name) for name in ("AdamW", *BY_TENSOR)},
    **{f"formula {name}": partial(shards_against_the_formula, name) for name in SUMS},
    **{f"hybrid {name}": partial(hybrid, name) for name in ("AdamW", "Lamb")},
    **{f"hybrid shards {name}": partial(hybrid_shards, name) for name in ("AdamP", "BertAdam")},
    **{f"save {name}": partial(save, name) for name in ("AdamW", "Lamb", "SGD")},
}
RELOADED = {f"load {name}": partial(load, name) for name in ("AdamW", "Lamb", "SGD")}
