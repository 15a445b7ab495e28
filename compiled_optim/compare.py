"""The next step both ways, for those who do not trust compilers: compiled on the parameters, eagerly on copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tabulate import tabulate
from torch import Tensor

from compiled_optim import shards
from compiled_optim.amp import is_overflow

if TYPE_CHECKING:
    from compiled_optim.optimizer import Optimizer

LISTED = 20
"""So many parameters are in the table; none of the others differs more."""


@dataclass(frozen=True)
class Difference:
    """How far a compiled step and an eager one came apart in one parameter, or in this process's shard of it.

    ``largest`` is the largest difference of an element, ``relative`` the same divided by the largest element, and
    ``states`` the largest difference in each state.
    """

    name: str
    largest: float
    relative: float
    states: Mapping[str, float]


class Comparison:
    """What :meth:`~compiled_optim.Optimizer.compare_eager` gives, empty until a step was made. It prints as a table.

    ``differences`` has one entry for each parameter, in their order; ``largest`` is the largest of them.
    """

    def __init__(self) -> None:
        self.differences: tuple[Difference, ...] = ()

    @property
    def largest(self) -> float:
        """The largest difference of an element of any parameter."""
        return max((difference.largest for difference in self.differences), default=0.0)

    def __str__(self) -> str:
        if not self.differences:
            return "no step was made to compare"
        worst = sorted(self.differences, key=lambda difference: -difference.largest)
        rows = [
            (d.name, f"{d.largest:.3g}", f"{d.relative:.3g}", ", ".join(f"{k} {v:.3g}" for k, v in d.states.items()))
            for d in worst[:LISTED]
        ]
        table = tabulate(rows, headers=("compiled - eager", "largest", "relative", "states"), disable_numparse=True)
        rest = len(worst) - LISTED
        return table + (f"\n... and {rest} more, none of which differs more" if rest > 0 else "")


@contextmanager
def comparing(optimizer: Optimizer) -> Iterator[Comparison]:
    """Compare the first step that is made in this context."""
    if not optimizer.compile:
        raise ValueError(
            "compare_eager() compares a compiled step with an eager one, but this optimizer steps eagerly; "
            "construct it with compile=True, and without COMPILED_OPTIM_EAGER in the environment"
        )
    comparison = Comparison()

    def update() -> None:
        del vars(optimizer)["_update"]
        if is_overflow(optimizer):  # there is no step
            return
        if optimizer.on_realloc == "recompile":
            with torch.no_grad(), optimizer._following():  # the copies are to be of what is stepped
                pass
        twin = _eager_twin(optimizer)
        optimizer._update()
        twin._update()
        comparison.differences = tuple(_differences(optimizer, twin))

    vars(optimizer)["_update"] = update  # in the way of the method, for one step
    try:
        yield comparison
    finally:
        vars(optimizer).pop("_update", None)


def _eager_twin(optimizer: Optimizer) -> Optimizer:
    """The same optimizer over copies of the parameters and states, with the same gradients."""
    twin = type(optimizer).__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    copies = {param: _copy(param) for param in optimizer._params()}
    twin.param_groups = [
        {**group, "params": [copies[param] for param in group["params"]]} for group in optimizer.param_groups
    ]
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    for param, values in optimizer.own_state.items():
        if param in copies:
            state[copies[param]] = {
                name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()
            }
    twin.state = state
    twin.compile = False
    twin._start()
    twin._tracker.see(twin._params())
    return twin


def _copy(param: Tensor) -> Tensor:
    copy = torch.nn.Parameter(param.detach().clone(), param.requires_grad)
    copy.grad = param.grad  # a step writes to no gradient
    return copy


def _differences(optimizer: Optimizer, twin: Optimizer) -> Iterator[Difference]:
    names = optimizer.parameter_names()
    for name, param, copy in zip(names, optimizer._params(), twin._params(), strict=True):
        largest = _distance(param, copy)
        here = shards.local(copy).detach()
        scale = float(here.abs().max()) if here.numel() else 0.0
        state, expected = optimizer.own_state.get(param, {}), twin.own_state.get(copy, {})
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor) and key != "step"}
        states = {key: _distance(value, expected[key]) for key, value in tensors.items()}
        yield Difference(name, largest, largest / scale if scale else largest, states)


def _distance(actual: Tensor, expected: Tensor) -> float:
    """The largest difference of an element; where both are the same infinity or not a number, there is none."""
    wide = torch.complex128 if actual.is_complex() else torch.float64
    a, b = (shards.local(tensor).detach().to("cpu", wide) for tensor in (actual, expected))
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, (a - b).abs()).max()) if a.numel() else 0.0
