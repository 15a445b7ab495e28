"""The steps that the hardware-free tests compile: each optimizer over twenty weights and biases of many sizes."""

from __future__ import annotations

from typing import Any

import torch

import compiled_optim as co
from catalog import CATALOG
from compiled_optim.backends import Backend, Batch
from compiled_optim.engine.buckets import Bucket
from compiled_optim.engine.plan import clips_any
from compiled_optim.engine.sorting import make_buckets
from tests.helpers import params_of

OPTIMIZERS = {name: entry.typical for name, entry in CATALOG.items()}
SHARDED = {
    f"{name} sharded": (name, {})
    for name, entry in CATALOG.items()
    if entry.sums == "tensor" and not getattr(co, name).matrices
}
"""Optimizers that take sums over tensors. With sharded tensors, each stage of sums is a call, like the update."""

STORED: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bfloat16 states": (torch.float32, {"state_dtype": torch.bfloat16}),
    "8-bit states": (torch.float32, {"state_dtype": "8bit"}),
    "stochastic": (torch.bfloat16, {"rounding": "stochastic"}),
    "kahan": (torch.bfloat16, {"rounding": "kahan"}),
    "master weights": (torch.bfloat16, {"master_weights": True}),
}
"""How parameters and states can be kept: the dtype of the parameters, and options."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW clipped": ("AdamW", {"max_grad_norm": 1.0}),
    "Lamb cautious": ("Lamb", {"cautious": True}),
}
"""Steps with more calls or passes: a norm over all gradients, and a stage of sums after another."""

WEIGHTS = [(64, 32), (128, 64), (33, 17), (256, 128), (512, 64), (7, 5, 3), (65, 65), (96, 4), (32, 3, 3, 3), (200, 50)]
TWENTY = [*WEIGHTS, *((shape[0],) for shape in WEIGHTS[:-1]), (1,)]


def optimizer(name: str, shapes=TWENTY, dtype: torch.dtype = torch.float32, **options: Any) -> co.Optimizer:
    """Return an optimizer on the CPU; its program is the same on every device."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    return getattr(co, name)(params, **{**OPTIMIZERS[name], **options}, compile=False)


class OneProcess:
    """Sharding over a single process, which holds whole tensors."""

    def all_reduce_(self, sums: torch.Tensor) -> None:
        """Leave the sums as they are."""


def buckets(optimizer: co.Optimizer, backend: Backend, sharded: bool = False, unscales: bool = False) -> list[Bucket]:
    """Return the buckets of a step in which every parameter has a gradient."""
    groups, params = optimizer.param_groups, params_of(optimizer)
    names = [""] * len(params)
    found = make_buckets(optimizer, groups, {}, params, lambda: names, lambda device: (backend, False), unscales)
    for bucket in found:
        bucket.shards = OneProcess() if sharded else None  # type: ignore[assignment]
    return found


def batches(
    optimizer: co.Optimizer, backend: Backend, device: str, sharded: bool = False, unscales: bool = False
) -> list[Batch]:
    """Return the batches of a step, as if the parameters were on ``device`` and, optionally, sharded."""
    found = []
    for bucket in buckets(optimizer, backend, sharded, unscales):
        for batch in bucket.batches(clips_any(optimizer, optimizer.param_groups)):
            batch.device = device
            found.append(batch)
    return found
