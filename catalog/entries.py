"""The catalog entries, one for each optimizer."""

from __future__ import annotations

from functools import partial

import torch

from catalog import references
from catalog.entry import Entry, Measured, Published, Refused, combinations
from catalog.references import Formula

NAN = float("nan")

LR_AND_DECAY: tuple[Refused, ...] = (
    *(({"lr": lr}, f"Invalid learning rate: {lr}") for lr in (-1.0, NAN)),
    ({"lr": torch.ones(2)}, "Tensor lr must be 1-element"),
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
NESTEROV = "Nesterov momentum requires a momentum and zero dampening"

SGD = Entry(
    name="SGD",
    reference=torch.optim.SGD,
    parity=tuple(
        options
        for options in combinations(
            momentum=[None, 0.9],
            dampening=[None, 0.3],
            nesterov=[None, True],
            weight_decay=[None, 0.1],
            maximize=[None, True],
        )
        if "momentum" in options or not options.keys() & {"nesterov", "dampening"}
        if not options.keys() >= {"nesterov", "dampening"}
    ),
    typical={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    distributed={"lr": 0.02, "momentum": 0.9},
    refused=(
        *LR_AND_DECAY,
        ({"momentum": -0.5}, "Invalid momentum value: -0.5"),
        ({"momentum": NAN}, "Invalid momentum value: nan"),
        ({"nesterov": True}, NESTEROV),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, NESTEROV),
    ),
    fused=True,
    tolerance=(1e-12, 2e-6),
    measured=Measured({"lr": 1e-2, "momentum": 0.9}, states=1, clip=1.0, published=(Published("optimi", "SGD"),)),
)

ADAM_PARITY = combinations(amsgrad=[None, True], weight_decay=[0, 0.1], maximize=[None, True])
OPTIMI = {"betas": (0.9, 0.999), "eps": 1e-8, "kahan_sum": False}

ADAM = Entry(
    name="Adam",
    reference=torch.optim.Adam,
    parity=ADAM_PARITY,
    typical={"weight_decay": 0.01, "amsgrad": True},
    distributed={"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3},
    refused=(
        *LR_AND_DECAY,
        *EPS,
        *BETAS,
        ({"betas": (0.9, torch.tensor(0.9))}, "betas must be either both floats or both Tensors"),
        ({"betas": (torch.ones(2) / 2, torch.ones(2) / 2)}, "Tensor betas[0] must be 1-element"),
    ),
    fused=True,
    tolerance=(1e-12, 2e-6),
    float16={"eps": 1e-3},
    measured=Measured(
        {"lr": 1e-3},
        states=2,
        published=(
            Published("optimi", "Adam", OPTIMI),
            Published("deepspeed.ops.adam", "DeepSpeedCPUAdam", {"adamw_mode": False, "fp32_optimizer_states": False}),
        ),
    ),
)

ADAMW = Entry(
    name="AdamW",
    reference=torch.optim.AdamW,
    parity=ADAM_PARITY,
    typical={},
    distributed={"lr": 0.01, "eps": 1e-3},
    refused=(*LR_AND_DECAY, *EPS, *BETAS),
    fused=True,
    tolerance=(1e-12, 2e-6),
    float16={"eps": 1e-3},
    measured=Measured(
        {"lr": 1e-3, "weight_decay": 1e-2},
        states=2,
        clip=1.0,
        published=(
            Published("heavyball", "AdamW", {"betas": (0.9, 0.999), "eps": 1e-8}),
            Published("optimi", "AdamW", OPTIMI),
            Published("deepspeed.ops.adam", "DeepSpeedCPUAdam", {"fp32_optimizer_states": False}),
        ),
    ),
)

ADAMP = Entry(
    name="AdamP",
    reference=partial(Formula, formula=references.adamp),
    parity=(
        {},
        {"weight_decay": 0.1, "nesterov": True},
        {"weight_decay": 0.1, "delta": 5.0, "wd_ratio": 0.3, "eps": 1e-3},
    ),
    typical={"weight_decay": 0.01, "delta": 0.9},  # some tensors are projected with this delta, and some are not
    distributed={"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3},
    refused=(
        *LR_AND_DECAY,
        *EPS,
        *BETAS,
        ({"delta": -0.1}, "Invalid delta value: -0.1"),
        ({"wd_ratio": NAN}, "Invalid wd_ratio value: nan"),
    ),
    float16={"eps": 1e-3},
    sums="tensor",
    measured=Measured({"lr": 1e-3, "weight_decay": 1e-2}, states=2, published=(Published("adamp", "AdamP"),)),
)

LAMB = Entry(
    name="Lamb",
    reference=partial(Formula, formula=references.lamb),
    parity=(
        {},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "adam": True},
        {"use_global_grad_norm": True, "weight_decay": 0.1, "maximize": True},
    ),
    typical={"weight_decay": 0.01},
    distributed={"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3},
    refused=(*LR_AND_DECAY, *EPS, *BETAS),
    float16={"eps": 1e-3},
    sums="tensor",
    measured=Measured(
        {"lr": 1e-2, "weight_decay": 1e-2}, states=2, published=(Published("perf.peers", "ForeachLamb"),)
    ),
)

BERT_ADAM = Entry(
    name="BertAdam",
    reference=partial(Formula, formula=references.bert_adam),
    parity=(
        {"max_grad_norm": -1, "weight_decay": 0},
        *(
            {"warmup": warmup, "t_total": 15, "schedule": schedule}
            for schedule in ("warmup_linear", "warmup_cosine", "warmup_constant", "warmup_poly")
            for warmup in (0.3, -1)
        ),
    ),
    typical={"warmup": 0.1, "t_total": 20},
    distributed={"lr": 0.01, "max_grad_norm": 0.1, "e": 1e-3},
    refused=(
        *LR_AND_DECAY,
        ({"warmup": 1.0}, "Invalid warmup: 1.0"),
        ({"warmup": -0.5}, "Invalid warmup: -0.5"),
        ({"schedule": "cosine"}, "Invalid schedule parameter: cosine"),
        ({"b1": 1.0}, "Invalid b1 parameter: 1.0"),
        ({"b2": -0.1}, "Invalid b2 parameter: -0.1"),
        ({"e": -1.0}, "Invalid epsilon value: -1.0"),
    ),
    sums="all gradients",
    without_norm={"max_grad_norm": -1},
    measured=Measured(
        {"lr": 1e-3, "weight_decay": 1e-2},
        states=2,
        published=(Published("perf.peers", "ForeachLamb", {"trust": False, "clip": 1.0}),),
    ),
)

ADADELTA = Entry(
    name="Adadelta",
    reference=torch.optim.Adadelta,
    parity=({}, {"weight_decay": 0.1, "rho": 0.8, "maximize": True}),
    typical={"weight_decay": 0.01},
    distributed={"lr": 0.5},
    refused=(*LR_AND_DECAY, *EPS, ({"rho": 1.5}, "Invalid rho value: 1.5")),
    measured=Measured({"lr": 1.0}, states=2),
)

RMSPROP = Entry(
    name="RMSprop",
    reference=torch.optim.RMSprop,
    parity=combinations(momentum=[0, 0.9], centered=[False, True], weight_decay=[0, 0.1], eps=[1e-2]),
    typical={"momentum": 0.9, "centered": True},
    distributed={"lr": 0.01, "momentum": 0.9, "eps": 1e-3},
    refused=(
        *LR_AND_DECAY,
        *EPS,
        ({"alpha": -0.5}, "Invalid alpha value: -0.5"),
        ({"momentum": -0.5}, "Invalid momentum value: -0.5"),
    ),
    measured=Measured({"lr": 1e-3}, states=1),
)

RMSPROP_TF = Entry(
    name="RMSpropTF",
    reference=partial(Formula, formula=references.rmsprop_tf),
    parity=(
        {"momentum": 0.0, "centered": False, "eps": 1e-3},
        {"momentum": 0.0, "centered": True, "eps": 1e-3, "weight_decay": 0.1},
        {"momentum": 0.9, "centered": False, "eps": 1e-3, "weight_decay": 0.01, "decoupled_decay": True},
        {"momentum": 0.9, "centered": True, "eps": 1e-3, "lr_in_momentum": False},
        {
            "momentum": 0.9,
            "centered": False,
            "eps": 1e-3,
            "weight_decay": 0.1,
            "lr_in_momentum": False,
            "maximize": True,
        },
    ),
    typical={"momentum": 0.9, "centered": True},
    distributed={"lr": 0.01},
    refused=(*LR_AND_DECAY, *EPS, ({"momentum": NAN}, "Invalid momentum value: nan")),
    measured=Measured({"lr": 1e-3}, states=1, published=(Published("perf.peers", "ForeachRMSpropTF"),)),
)

LION = Entry(
    name="Lion",
    reference=partial(Formula, formula=references.lion),
    parity=({}, {"weight_decay": 0.1, "betas": (0.8, 0.95), "maximize": True}),
    typical={"weight_decay": 0.01},
    distributed={"lr": 0.001},
    refused=(*LR_AND_DECAY, *BETAS, ({"betas": (0.9,)}, "Invalid betas: (0.9,); 2 values are needed")),
)

ADAN = Entry(
    name="Adan",
    reference=partial(Formula, formula=references.adan),
    parity=({}, {"weight_decay": 0.1, "betas": (0.9, 0.7, 0.8), "eps": 1e-3, "maximize": True}),
    typical={"weight_decay": 0.01},
    distributed={"lr": 0.01, "eps": 1e-3},
    refused=(
        *LR_AND_DECAY,
        *EPS,
        ({"betas": (0.9, 0.9)}, "Invalid betas: (0.9, 0.9); 3 values are needed"),
        ({"betas": (0.9, 0.9, 1.0)}, "Invalid beta parameter at index 2: 1.0"),
    ),
)

CATALOG: dict[str, Entry] = {
    entry.name: entry for entry in (SGD, ADAM, ADAMW, ADAMP, LAMB, BERT_ADAM, ADADELTA, RMSPROP, RMSPROP_TF, LION, ADAN)
}
