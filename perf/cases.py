"""Which races are run: the default list, or the product of what was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One race. ``whole_model`` lets in, unasked, those who compile the whole model at once."""

    workload: str
    optimizer: str
    dtype: str = "float32"
    whole_model: bool = False

    def __str__(self) -> str:
        return f"{self.workload} {self.optimizer} {self.dtype}"


DEFAULT = [
    Case("tiny_mlp", "AdamW"),
    Case("thousand_tensors", "AdamW"),
    Case("resnet50", "AdamW", whole_model=True),
    Case("gpt2_small", "AdamW"),
    Case("resnet50", "AdamW+clip"),
    Case("gpt2_small", "AdamW+clip"),
    Case("resnet50", "AdamW", "bfloat16"),
    Case("gpt2_small", "AdamW", "bfloat16"),
    *(Case("resnet50", name) for name in ("SGD", "AdamP", "Lamb", "BertAdam", "Adadelta", "RMSprop")),
    Case("gpt2_small", "Lamb"),
]


def choose(workloads: Sequence[str], optimizers: Sequence[str], dtypes: Sequence[str]) -> list[Case]:
    """The default list if nothing was asked for; else every combination, what was left open being as usual."""
    if not (workloads or optimizers or dtypes):
        return DEFAULT
    return [
        Case(workload, optimizer, dtype)
        for workload in workloads or ("tiny_mlp", "thousand_tensors", "resnet50", "gpt2_small")
        for optimizer in optimizers or ("AdamW",)
        for dtype in dtypes or ("float32",)
    ]
