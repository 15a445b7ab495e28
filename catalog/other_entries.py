"""The entries of optimizers that torch.optim does not have."""

from __future__ import annotations

from functools import partial

from catalog import references
from catalog.entry import Entry, Measured, Published
from catalog.references import Formula
from catalog.refused import BETAS, EPS, LR, LR_AND_DECAY, NAN, NESTEROV

ADAMP = Entry(
    name="AdamP",
    reference=partial(Formula, formula=references.adamp),
    formula="Adam without its part along p, where g ⟂ p",
    drop_in_for="adamp.AdamP",
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

SGDP = Entry(
    name="SGDP",
    reference=partial(Formula, formula=references.sgdp),
    formula="SGD without its part along p, where g ⟂ p",
    drop_in_for="adamp.SGDP",
    parity=(
        {},
        {"momentum": 0.9, "weight_decay": 0.1, "delta": 5.0, "wd_ratio": 0.3},
        {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.2, "maximize": True},
        {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True, "delta": 0.9, "eps": 1e-3},
    ),
    typical={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "delta": 0.9},
    distributed={"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01},
    refused=(
        *LR_AND_DECAY,
        *EPS,
        ({"momentum": -0.5}, "Invalid momentum value: -0.5"),
        ({"momentum": 1.0}, "Invalid momentum value: 1.0"),
        ({"delta": -0.1}, "Invalid delta value: -0.1"),
        ({"wd_ratio": NAN}, "Invalid wd_ratio value: nan"),
    ),
    sums="tensor",
    measured=Measured(
        {"lr": 1e-2, "momentum": 0.9, "weight_decay": 1e-4}, states=1, published=(Published("adamp", "SGDP"),)
    ),
)

LAMB = Entry(
    name="Lamb",
    reference=partial(Formula, formula=references.lamb),
    formula="u = m / (√v + ε) + λp; p −= lr·‖p‖/‖u‖·u",
    drop_in_for="torch_npu.optim.NpuFusedLamb",
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

LARS = Entry(
    name="Lars",
    reference=partial(Formula, formula=references.lars),
    formula="d = η‖p‖/(‖g‖ + λ‖p‖)·(g + λp); b = μb + d; p −= lr·b",
    drop_in_for="timm.optim.Lars",
    parity=(
        {"momentum": 0.9, "weight_decay": 0.01},
        {"momentum": 0.9, "nesterov": True, "always_adapt": True, "trust_coeff": 0.5, "maximize": True},
        {"momentum": 0.9, "dampening": 0.2},
        {"weight_decay": 0.1, "trust_coeff": 0.5, "trust_clip": True, "eps": 1e-3},
    ),
    typical={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "trust_coeff": 0.5},
    distributed={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "trust_coeff": 0.1},
    refused=(
        *LR_AND_DECAY,
        *EPS,
        ({"momentum": NAN}, "Invalid momentum value: nan"),
        ({"trust_coeff": -0.1}, "Invalid trust_coeff value: -0.1"),
        ({"nesterov": True}, NESTEROV),
    ),
    sums="tensor",
)

BERT_ADAM = Entry(
    name="BertAdam",
    reference=partial(Formula, formula=references.bert_adam),
    formula="p −= lr(t)·(m / (√v + ε) + λp)",
    drop_in_for="torch_npu.optim.NpuFusedBertAdam",
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

RMSPROP_TF = Entry(
    name="RMSpropTF",
    reference=partial(Formula, formula=references.rmsprop_tf),
    formula="p −= lr·g / √(v + ε), v from 1",
    drop_in_for="torch_npu.optim.NpuFusedRMSpropTF",
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
    formula="p = (1 − lr·λ)p − lr·sign(β₁m + (1 − β₁)g)",
    parity=({}, {"weight_decay": 0.1, "betas": (0.8, 0.95), "maximize": True}),
    typical={"weight_decay": 0.01},
    distributed={"lr": 0.001},
    refused=(*LR_AND_DECAY, *BETAS, ({"betas": (0.9,)}, "Invalid betas: (0.9,); 2 values are needed")),
)

ADAN = Entry(
    name="Adan",
    reference=partial(Formula, formula=references.adan),
    formula="p = (p − lr·(m + β₂d)/(√n + ε)) / (1 + lr·λ)",
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

MOMENTUM = "Invalid momentum of {}: {}; it must be between 0 and 1"

SCHEDULE_FREE_ADAMW = Entry(
    name="ScheduleFreeAdamW",
    reference=partial(Formula, formula=references.schedule_free_adamw),
    formula="z −= γ·g/(√v̂ + ε); x = mean of z; y = β₁x + (1 − β₁)z",
    drop_in_for="schedulefree.AdamWScheduleFree",
    parity=(
        {},
        {"weight_decay": 0.1, "betas": (0.8, 0.95), "warmup_steps": 8, "eps": 1e-3, "maximize": True},
        {"weight_decay": 0.1, "r": 0.5, "weight_lr_power": 1.0},
    ),
    typical={"weight_decay": 0.01, "warmup_steps": 3},
    distributed={"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1},
    refused=(
        *LR_AND_DECAY,
        *EPS,
        *BETAS,
        ({"betas": (0.0, 0.9)}, MOMENTUM.format("ScheduleFreeAdamW", 0.0)),
        ({"warmup_steps": -1}, "Invalid warmup_steps value: -1"),
    ),
    float16={"eps": 1e-3},
    measured=Measured(
        {"lr": 2.5e-3, "weight_decay": 1e-2}, states=2, published=(Published("schedulefree", "AdamWScheduleFree"),)
    ),
)

SCHEDULE_FREE_SGD = Entry(
    name="ScheduleFreeSGD",
    reference=partial(Formula, formula=references.schedule_free_sgd),
    formula="z −= γ·g; x = mean of z; y = βx + (1 − β)z",
    drop_in_for="schedulefree.SGDScheduleFree",
    parity=(
        {},
        {"momentum": 0.8, "weight_decay": 0.1, "warmup_steps": 8, "maximize": True},
        {"weight_decay": 0.1, "r": 0.5, "weight_lr_power": 1.0},
    ),
    typical={"lr": 0.1, "weight_decay": 0.01, "warmup_steps": 3},
    distributed={"lr": 0.1, "weight_decay": 0.01},
    refused=(
        *LR_AND_DECAY,
        *(({"momentum": value}, MOMENTUM.format("ScheduleFreeSGD", value)) for value in (0.0, 1.0, NAN)),
        ({"r": -1.0}, "Invalid r value: -1.0"),
    ),
)

PRODIGY = Entry(
    name="Prodigy",
    reference=partial(Formula, formula=references.prodigy),
    formula="p −= d·lr·m / (√v + dε), d = max Σg(p₀ − p)/Σ∣s∣",
    drop_in_for="prodigyopt.Prodigy",
    # with a d0 that moves parameters by more than a few units of their last bit in float32, and a d_coef that makes the
    # estimate grow although gradients are random
    parity=(
        {"d0": 0.05, "d_coef": 50.0},
        {"d0": 0.05, "d_coef": 50.0, "weight_decay": 0.1, "use_bias_correction": True, "growth_rate": 1.1},
        {"d0": 0.05, "weight_decay": 0.1, "decouple": False, "safeguard_warmup": True, "eps": 1e-3, "maximize": True},
    ),
    typical={"d0": 0.05, "weight_decay": 0.01, "use_bias_correction": True, "growth_rate": 2.0},
    distributed={"d0": 0.05, "lr": 1.0, "eps": 1e-3},
    refused=(
        *LR,
        ({"weight_decay": NAN}, "Invalid weight_decay value: nan"),
        ({"d0": 0.0}, "Invalid d0 value: 0.0"),
        ({"eps": 0.0}, "Invalid epsilon value: 0.0"),
        *BETAS,
        ({"beta3": 1.0}, "Invalid beta3 parameter: 1.0"),
        ({"growth_rate": 0.9}, "Invalid growth_rate value: 0.9"),
    ),
    tolerance=(1e-10, 2e-5),
    float16={"eps": 1e-3},
    sums="all gradients",
    without_norm={"d_coef": 0.0, "d0": 0.5},
)
