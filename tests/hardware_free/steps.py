"""What the hardware-free tests compile: all optimizers over twenty tensors, weights and biases of many sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import compiled_optim as co
from tests.helpers import params_of
from catalog import CATALOG
from compiled_optim.backends import Backend, Signature
from compiled_optim.collect import collect

OPTIMIZERS = {name: entry.typical for name, entry in CATALOG.items()}
SPLIT = {f"{name} split": (name, {}) for name, entry in CATALOG.items() if entry.sums == "tensor"}
"""Optimizers that take sums over tensors, in the two phases they have where tensors are split over processes."""

CLIPPED = {"AdamW clipped": ("AdamW", dict(max_grad_norm=1.0))}

WEIGHTS = [(64, 32), (128, 64), (33, 17), (256, 128), (512, 64), (7, 5, 3), (65, 65), (96, 4), (32, 3, 3, 3), (200, 50)]
TWENTY = [*WEIGHTS, *((shape[0],) for shape in WEIGHTS[:-1]), (1,)]


def optimizer(name: str, shapes=TWENTY, dtype: torch.dtype = torch.float32, **options: Any) -> co.Optimizer:
    """An optimizer on the CPU, whose program is the same everywhere."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    return getattr(co, name)(params, **{**OPTIMIZERS[name], **options}, compile=False)


class OnlyProcess:
    """A split over no other processes."""

    def add_up(self, sums: torch.Tensor) -> None:
        """All of it is here."""


def signatures(optimizer: co.Optimizer, backend: Backend, device: str, split: bool = False) -> list[Signature]:
    """What a step of this optimizer has compiled where its parameters are on another device, and maybe split."""
    found = []
    for spec in collect(optimizer, params_of(optimizer)):
        spec.split = OnlyProcess() if split else None  # type: ignore[assignment]
        kinds = spec.kinds(optimizer.clips_any())
        for lane, _ in backend.cut(spec.shapes()):
            found += [elsewhere(kind(lane), device) for kind in kinds]
    return found


def elsewhere(signature: Signature, device: str) -> Signature:
    """The same signature on another device."""
    return replace(signature, device=device)
