"""What is measured: each optimizer with its settings and the memory traffic it cannot avoid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rule:
    """An optimizer as every contender has to run it.

    ``ours`` names the class here, and in torch.optim if ``torch`` is true. ``states`` counts the tensors kept for each
    parameter. With ``clip``, gradients are clipped to that norm before the step; ``norm`` says that a norm over all
    gradients is part of the step, by ``clip`` or by the rule itself.
    """

    ours: str
    options: Mapping[str, Any]
    states: int
    torch: bool = False
    fused: bool = False
    clip: float | None = None
    norm: bool = field(default=False)

    def bytes_per_parameter(self, itemsize: int) -> int:
        """What one pass has to move: parameter and states read and written, the gradient read.

        A norm over all gradients has to be known before the first parameter changes, so it reads them once more. The
        norms of one tensor, as in AdamP and Lamb, are counted as free: a tensor may stay in the cache meanwhile.
        """
        reads, writes = 2 + self.states + self.norm, 1 + self.states
        return (reads + writes) * itemsize


_ADAMW = {"lr": 1e-3, "weight_decay": 1e-2}
_SGD = {"lr": 1e-2, "momentum": 0.9}

RULES: dict[str, Rule] = {
    "AdamW": Rule("AdamW", _ADAMW, states=2, torch=True, fused=True),
    "AdamW+clip": Rule("AdamW", _ADAMW, states=2, torch=True, fused=True, clip=1.0, norm=True),
    "Adam": Rule("Adam", {"lr": 1e-3}, states=2, torch=True, fused=True),
    "SGD": Rule("SGD", _SGD, states=1, torch=True, fused=True),
    "SGD+clip": Rule("SGD", _SGD, states=1, torch=True, fused=True, clip=1.0, norm=True),
    "AdamP": Rule("AdamP", _ADAMW, states=2),
    "Lamb": Rule("Lamb", {"lr": 1e-2, "weight_decay": 1e-2}, states=2),
    "BertAdam": Rule("BertAdam", _ADAMW, states=2, norm=True),
    "Adadelta": Rule("Adadelta", {"lr": 1.0}, states=2, torch=True),
    "RMSprop": Rule("RMSprop", {"lr": 1e-3}, states=1, torch=True),
    "RMSpropTF": Rule("RMSpropTF", {"lr": 1e-3}, states=1),
}
