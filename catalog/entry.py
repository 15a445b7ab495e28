"""What an entry of the catalog consists of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Options = Mapping[str, Any]
Refused = tuple[Options, str]
"""Constructor arguments, and the exact message of the ValueError they raise."""

Reference = type[torch.optim.Optimizer] | Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class Published:
    """An implementation of the optimizer to compare the speed with.

    ``module`` has it under ``name``; ``options`` are passed in addition to those of Measured.
    """

    module: str
    name: str
    options: Options = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """How the speed of an optimizer is measured.

    ``states`` counts the tensors kept for each parameter. An optimizer is measured a second time with its gradients
    clipped to the norm ``clip``, if that is given.
    """

    options: Options
    states: int
    clip: float | None = None
    published: tuple[Published, ...] = ()


@dataclass(frozen=True)
class Entry:
    """One optimizer.

    Attributes:
        name: The class in ``compiled_optim``, and in torch.optim if it has one.
        reference: What the results are compared with: the class of torch.optim, or a Formula.
        parity: The option sets that are compared with the reference; together they reach every branch of the rule.
        typical: Options for tests of something else: schedulers, GradScaler, checkpoints, lowering. They select the
            largest program, so that lowering covers it.
        distributed: Options for tests on several ranks. Epsilon is large enough that the rounding of gradients near
            zero makes no difference, and the learning rate is large enough to move the parameters.
        refused: Arguments that the constructor must refuse.
        fused: Whether torch.optim has a fused implementation.
        tolerance: The largest relative difference from the reference, in float64 and in float32.
        float16: Options that keep the states within the range of float16.
        sums: Whether a step takes sums over each "tensor", or over "all gradients".
        without_norm: Options that turn off the norm over all gradients, so that parameters are independent.
        measured: How the speed is measured, if it is.
    """

    name: str
    reference: Reference
    parity: tuple[Options, ...]
    typical: Options
    distributed: Options
    refused: tuple[Refused, ...]
    fused: bool = False
    tolerance: tuple[float, float] = (1e-11, 5e-6)
    float16: Options = field(default_factory=dict)
    sums: Literal["tensor", "all gradients"] | None = None
    without_norm: Options = field(default_factory=dict)
    measured: Measured | None = None

    @property
    def in_torch(self) -> bool:
        """Whether torch.optim has the optimizer."""
        return isinstance(self.reference, type)


def combinations(**choices: list[Any]) -> tuple[Options, ...]:
    """Return every combination of the choices; an option whose choice is None is left out."""
    return tuple(
        {key: value for key, value in zip(choices, values, strict=True) if value is not None}
        for values in itertools.product(*choices.values())
    )
