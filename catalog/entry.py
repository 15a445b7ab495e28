"""The fields of a catalog entry."""

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
    """Another implementation of the optimizer, for benchmarks.

    It is the attribute ``name`` of ``module``. ``options`` are passed in addition to those of Measured.
    """

    module: str
    name: str
    options: Options = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """The benchmark settings of an optimizer.

    ``states`` is the number of state tensors for each parameter. If ``clip`` is given, the optimizer is measured a
    second time with its gradients clipped to this norm.
    """

    options: Options
    states: int
    clip: float | None = None
    published: tuple[Published, ...] = ()


@dataclass(frozen=True)
class Entry:
    """The catalog entry of one optimizer.

    Attributes:
        name: The name of the class in ``compiled_optim``, and in torch.optim if it has one.
        reference: The class that the results are compared with: from torch.optim, or a Formula.
        formula: The formula in a few characters, for the table of all optimizers.
        drop_in_for: The class of another package with the same arguments.
        parity: Sets of options that are compared with the reference. Together they cover every branch of the rule.
        typical: Options for tests of schedulers, GradScaler, checkpoints and lowering. They select the largest
            program, so that lowering covers it.
        distributed: Options for tests on several ranks. Epsilon is large enough that rounding errors of gradients near
            zero have no effect, and the learning rate is large enough to move the parameters.
        refused: Arguments that the constructor must reject.
        fused: Whether torch.optim has a fused implementation.
        tolerance: The largest relative difference from the reference, in float64 and in float32.
        float16: Options that keep the states within the range of float16.
        sums: The scope of the sums in a step: "tensor" or "all gradients".
        steps_empty: Whether the reference can step parameters without elements.
        without_norm: Options that turn off the norm over all gradients, so that parameters are independent.
        measured: The benchmark settings, or None if it is not measured.
        takes: The parameters it takes: tensors of any shape, or matrices only.
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
    steps_empty: bool = True
    without_norm: Options = field(default_factory=dict)
    measured: Measured | None = None
    formula: str = ""
    drop_in_for: str = ""
    takes: Literal["any shape", "matrices"] = "any shape"

    @property
    def in_torch(self) -> bool:
        """True if torch.optim has the optimizer."""
        return isinstance(self.reference, type)


def combinations(**choices: list[Any]) -> tuple[Options, ...]:
    """Return every combination of the choices. A choice of None omits the option."""
    return tuple(
        {key: value for key, value in zip(choices, values, strict=True) if value is not None}
        for values in itertools.product(*choices.values())
    )
