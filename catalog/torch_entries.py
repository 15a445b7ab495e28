"""The entries of optimizers that torch.optim has too."""

from __future__ import annotations

import torch

from catalog.entry import Entry, Measured, Published, combinations
from catalog.refused import BETAS, EPS, LR, LR_AND_DECAY, NAN, NESTEROV

SGD = Entry(
    name="SGD",
    reference=torch.optim.SGD,
    formula="b = μb + g; p −= lr·b",
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
    formula="p −= lr·m̂ / (√v̂ + ε)",
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
    formula="p = (1 − lr·λ)p − lr·m̂ / (√v̂ + ε)",
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

ADADELTA = Entry(
    name="Adadelta",
    reference=torch.optim.Adadelta,
    formula="p −= lr·g·√(Δ + ε)/√(v + ε)",
    parity=({}, {"weight_decay": 0.1, "rho": 0.8, "maximize": True}),
    typical={"weight_decay": 0.01},
    distributed={"lr": 0.5},
    refused=(*LR_AND_DECAY, *EPS, ({"rho": 1.5}, "Invalid rho value: 1.5")),
    measured=Measured({"lr": 1.0}, states=2),
)

RMSPROP = Entry(
    name="RMSprop",
    reference=torch.optim.RMSprop,
    formula="p −= lr·g / (√v + ε)",
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

ADAMAX = Entry(
    name="Adamax",
    reference=torch.optim.Adamax,
    formula="p −= lr·m̂ / max(β₂u, ∣g∣ + ε)",
    parity=({}, {"weight_decay": 0.1, "betas": (0.8, 0.9), "maximize": True}),
    typical={"weight_decay": 0.01},
    distributed={"lr": 0.01, "eps": 1e-3},
    refused=(*LR_AND_DECAY, *EPS, *BETAS),
    tolerance=(1e-12, 2e-6),
    measured=Measured({"lr": 2e-3}, states=2),
)

ADAGRAD = Entry(
    name="Adagrad",
    reference=torch.optim.Adagrad,
    formula="p −= lr·g / (√Σg² + ε)",
    parity=({}, {"weight_decay": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5, "maximize": True}),
    typical={"weight_decay": 0.01, "lr_decay": 0.01, "initial_accumulator_value": 0.1},
    distributed={"lr": 0.1, "eps": 1e-3},
    refused=(
        *LR_AND_DECAY,
        *EPS,
        ({"lr_decay": -0.5}, "Invalid lr_decay value: -0.5"),
        ({"initial_accumulator_value": NAN}, "Invalid initial_accumulator_value value: nan"),
    ),
    fused=True,
    tolerance=(1e-12, 2e-6),
    float16={"eps": 1e-3},
    measured=Measured({"lr": 1e-2}, states=1),
)

RADAM = Entry(
    name="RAdam",
    reference=torch.optim.RAdam,
    formula="p −= lr·ρ(t)·m̂ / (√v̂ + ε)",
    parity=(
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
        {"betas": (0.9, 0.5)},  # never uses the second moment; the others use it from the sixth step on
    ),
    typical={"weight_decay": 0.01},
    distributed={"lr": 0.01, "eps": 1e-3},
    refused=(*LR_AND_DECAY, *EPS, *BETAS),
    tolerance=(1e-12, 2e-6),
    float16={"eps": 1e-3},
    measured=Measured({"lr": 1e-2}, states=2),
)

RPROP = Entry(
    name="Rprop",
    reference=torch.optim.Rprop,
    formula="p −= η·sign(g), with η by sign changes",
    parity=({}, {"etas": (0.3, 1.7), "step_sizes": (0.02, 0.3), "maximize": True}),
    typical={"step_sizes": (0.001, 0.5)},
    distributed={"lr": 0.01},
    refused=(
        *LR,
        *(({"etas": etas}, f"Invalid eta values: {etas[0]}, {etas[1]}") for etas in [(0.0, 1.2), (0.5, 1.0), (NAN, 2)]),
    ),
    tolerance=(1e-12, 2e-6),
    measured=Measured({"lr": 1e-3}, states=2),
)

NADAM = Entry(
    name="NAdam",
    reference=torch.optim.NAdam,
    formula="p −= lr·(μ₁g + μ₂m) / (√v̂ + ε)",
    parity=(
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
        {"momentum_decay": 0.1, "betas": (0.8, 0.9)},
    ),
    typical={"weight_decay": 0.01},
    distributed={"lr": 0.01, "eps": 1e-3},
    refused=(*LR_AND_DECAY, *EPS, *BETAS, ({"momentum_decay": -0.1}, "Invalid momentum_decay value: -0.1")),
    tolerance=(1e-12, 2e-6),
    float16={"eps": 1e-3},
    measured=Measured({"lr": 2e-3}, states=2),
)

ASGD = Entry(
    name="ASGD",
    reference=torch.optim.ASGD,
    formula="p = (1 − λη)p − ηg; ax = mean of p",
    parity=({}, {"lambd": 0.1, "alpha": 0.5, "t0": 5.0, "weight_decay": 0.1, "maximize": True}),
    typical={"weight_decay": 0.01, "t0": 2.0, "lambd": 0.01},
    distributed={"lr": 0.1, "t0": 2.0},
    refused=LR_AND_DECAY,
    tolerance=(1e-12, 2e-6),
    measured=Measured({"lr": 1e-2}, states=1),
)

ADAFACTOR = Entry(
    name="Adafactor",
    reference=torch.optim.Adafactor,
    formula="p −= α·g / √(r·c), with r and c by rows and columns",
    parity=(
        *combinations(weight_decay=[None, 0.1], maximize=[None, True]),
        {"beta2_decay": -0.5, "eps": (1e-2, 1e-2), "d": 1.5},
    ),
    typical={"weight_decay": 0.01},
    distributed={"lr": 0.05},
    refused=(
        ({"lr": -1.0}, "Learning rate should be >= 0 but is: -1.0"),
        ({"lr": torch.ones(2)}, "Tensor lr must be 1-element"),
        ({"beta2_decay": 0.8}, "beta2_decay should be <= 0 but is: 0.8"),
        ({"eps": (-1.0, 1e-3)}, "epsilon1 should be >= 0 but is: -1.0"),
        ({"eps": (None, NAN)}, "epsilon2 should be >= 0 but is: nan"),
        ({"d": 0.5}, "Clipping threshold d should be >= 1 but is: 0.5"),
        ({"weight_decay": -1}, "weight_decay should be >= 0 but is: -1"),
    ),
    tolerance=(1e-12, 2e-6),
    sums="tensor",
    steps_empty=False,
    # by default, eps[0] depends on the dtype; the states are vectors, except for vectors
    measured=Measured({"lr": 1e-2, "eps": (1e-7, 1e-3)}, states=0),
)

MUON = Entry(
    name="Muon",
    reference=torch.optim.Muon,
    formula="p −= lr·c·O(m), with the nearest orthogonal matrix O",
    parity=(
        *combinations(nesterov=[None, False], adjust_lr_fn=[None, "match_rms_adamw"]),
        {"weight_decay": 0.0, "adjust_lr_fn": "original"},
        {"momentum": 0.3, "ns_steps": 3},
        {"ns_coefficients": (2.0, -1.5, 0.5), "eps": 1.0},
    ),
    typical={"lr": 0.02, "weight_decay": 0.01},
    distributed={"lr": 0.02, "weight_decay": 0.1},
    refused=(
        ({"lr": -0.1}, "Learning rate should be >= 0 but is: -0.1"),
        ({"lr": NAN}, "Learning rate should be >= 0 but is: nan"),
        ({"lr": torch.ones(2)}, "Tensor lr must be 1-element"),
        ({"momentum": -0.5}, "momentum should be >= 0 but is: -0.5"),
        ({"weight_decay": -0.5}, "weight decay should be >= 0 but is: -0.5"),
        ({"adjust_lr_fn": "arbitrary"}, "Adjust learning rate function arbitrary is not supported"),
        ({"ns_steps": 100}, "Number of steps must be less than 100 for computational efficiency"),
        ({"ns_coefficients": (1.0, 2.0)}, "Coefficients must be a tuple of exactly 3 values"),
        ({"ns_dtype": torch.int8}, "Invalid ns_dtype value: torch.int8; use a floating point dtype"),
    ),
    tolerance=(1e-12, 1e-3),  # in float32, a rounding error changes the last bit of a few elements in bfloat16
    takes="matrices",
)
