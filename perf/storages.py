"""Ways to store the parameters and states of AdamW: options of ours, and the 8-bit states of other packages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

OPTIMIZER = "AdamW"
"""The optimizer whose storage is measured."""


@dataclass(frozen=True)
class Stored:
    """One way to store parameters and states.

    ``dtype`` is the dtype of the parameters. ``tolerance`` is the largest deviation from the float64 reference,
    relative to the length of the first steps; None is that of the dtype.
    """

    dtype: str
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float | None = None


EIGHT_BIT_TOLERANCE = 0.15
"""A momentum in 8 bits is rounded by up to 1/8 of itself, and the second of the checked steps uses it."""

OWN = {
    "ours, bf16 states": Stored("float32", {"state_dtype": torch.bfloat16}),
    "ours, 8-bit states": Stored("float32", {"state_dtype": "8bit"}, EIGHT_BIT_TOLERANCE),
    "ours, stochastic": Stored("bfloat16", {"rounding": "stochastic"}),
    "ours, kahan": Stored("bfloat16", {"rounding": "kahan"}),
    "ours, master weights": Stored("bfloat16", {"master_weights": True}),
}
"""Options of ours, by the name of the contender."""

THEIRS = {
    "torchao 8-bit": ("torchao", "torchao.optim", Stored("float32", tolerance=EIGHT_BIT_TOLERANCE)),
    "bitsandbytes 8-bit": ("bitsandbytes", "bitsandbytes.optim", Stored("float32", tolerance=EIGHT_BIT_TOLERANCE)),
}
"""Other packages, with the module that has an AdamW8bit, by the name of the contender."""
