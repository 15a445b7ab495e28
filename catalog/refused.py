"""Constructor arguments that several optimizers reject, with the message of the ValueError."""

from __future__ import annotations

import torch

from catalog.entry import Refused

NAN = float("nan")
NESTEROV = "Nesterov momentum requires a momentum and zero dampening"

LR: tuple[Refused, ...] = (
    *(({"lr": lr}, f"Invalid learning rate: {lr}") for lr in (-1.0, NAN)),
    ({"lr": torch.ones(2)}, "Tensor lr must be 1-element"),
)
LR_AND_DECAY: tuple[Refused, ...] = (
    *LR,
    *(({"weight_decay": decay}, f"Invalid weight_decay value: {decay}") for decay in (-1, NAN)),
)
EPS: tuple[Refused, ...] = tuple(({"eps": eps}, f"Invalid epsilon value: {eps}") for eps in (-1.0, -1e-8, NAN))
BETAS: tuple[Refused, ...] = tuple(
    ({"betas": betas}, f"Invalid beta parameter at index {index}: {betas[index]}")
    for betas, index in [
        ((1.0, 0.9), 0),
        ((-0.1, 0.9), 0),
        ((NAN, 0.9), 0),
        ((0.9, 1.0), 1),
        ((0.9, -0.1), 1),
        ((0.9, NAN), 1),
    ]
)
