"""Select the races: the default list, or the product of the command-line options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One race. To save time, it skips the contenders in ``without`` unless --contender is given.

    With ``storages`` the contenders that differ in their storage take part.
    """

    workload: str
    optimizer: str
    dtype: str = "float32"
    without: Sequence[str] = ()
    storages: bool = False

    def __str__(self) -> str:
        return f"{self.workload} {self.optimizer} {self.dtype}"


SLOWEST = ("ours eager", "torch loop")

STORED = ["resnet50", "gpt2_small"]
"""The workloads whose storages are raced by default."""

DEFAULT = [
    *(Case(name, "AdamW") for name in ("tiny_mlp", "thousand_tensors")),
    *(Case(name, "AdamW", storages=True) for name in STORED),
    *(Case(name, "AdamW", without=SLOWEST) for name in ("random_half", "many_groups")),
    *(Case(name, "SGD", without=SLOWEST) for name in ("tiny_mlp", "thousand_tensors")),
    *(Case(name, "AdamW+clip", without=SLOWEST) for name in ("resnet50", "gpt2_small")),
    *(Case(name, "AdamW", "bfloat16", SLOWEST, storages=True) for name in STORED),
    *(Case("resnet50", name, without=SLOWEST) for name in ("SGD", "AdamP", "Lamb", "BertAdam", "Adadelta", "RMSprop")),
    Case("gpt2_small", "Lamb", without=SLOWEST),
]
"""The most important races; they take a few minutes."""


SCALED = ("resnet50",)
"""The workloads whose thread scaling is measured by default."""


def choose(workloads: Sequence[str], optimizers: Sequence[str], dtypes: Sequence[str]) -> list[Case]:
    """Return DEFAULT if all arguments are empty, otherwise every combination; an empty argument gets its default."""
    if not (workloads or optimizers or dtypes):
        return DEFAULT
    return [
        Case(workload, optimizer, dtype)
        for workload in workloads or ("tiny_mlp", "thousand_tensors", "resnet50", "gpt2_small")
        for optimizer in optimizers or ("AdamW",)
        for dtype in dtypes or ("float32",)
    ]
