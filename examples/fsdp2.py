"""FSDP2: each rank keeps and steps its shards, and the run computes what one process would compute.

Lamb needs norms of whole weights, and clipping the norm of all gradients; both are all-reduced inside the step. The
example trains on all ranks, then saves a checkpoint that any number of ranks can load.

Run it with ``torchrun --nproc-per-node 2 examples/fsdp2.py``, or on one rank with ``python examples/fsdp2.py``.
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import compiled_optim as co

STEPS = 30


def main() -> None:
    """Train a sharded model and save it."""
    alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    torch.manual_seed(0)  # the same first weights on every rank
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 1))
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    optimizer = co.Lamb(model, lr=1e-2, max_grad_norm=1.0)  # after sharding, as with torch.optim
    if dist.get_rank() == 0:
        optimizer.warmup()  # one rank compiles, and the others load the result from disk
    dist.barrier()

    data = torch.Generator().manual_seed(dist.get_rank())  # other data on every rank
    losses = []
    for _ in range(STEPS):
        x = torch.randn(64, 16, generator=data)
        loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    shard = optimizer.param_groups[0]["params"][0].to_local()
    print(
        f"rank {dist.get_rank()} of {dist.get_world_size()}: loss {losses[0]:.3f} at first, {losses[-1]:.3f} at the "
        f"end; has {tuple(shard.shape)} of the first weight"
    )
    assert losses[-1] < losses[0]

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    state = get_optimizer_state_dict(model, optimizer)
    dcp.save(state, checkpoint_id=folder[0])
    dcp.load(state, checkpoint_id=folder[0])
    set_optimizer_state_dict(model, optimizer, state)
    if dist.get_rank() == 0:
        print("saved and loaded a checkpoint")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
