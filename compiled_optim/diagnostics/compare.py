"""Compare a compiled step on the parameters with an eager step on copies, and report the differences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from tabulate import tabulate
from torch import Tensor

from compiled_optim import backends
from compiled_optim.engine.plan import Plan
from compiled_optim.engine.rule import Group, Rule, all_params
from compiled_optim.engine.sharding import local_grads
from compiled_optim.engine.sorting import make_buckets
from compiled_optim.engine.states import State
from compiled_optim.engine.tensor_types import local_shard

MAX_ROWS = 20
"""The number of parameters in the table. The largest differences come first."""


@dataclass(frozen=True)
class Difference:
    """The difference between a compiled and an eager step in one parameter, or in its local shard.

    ``largest`` is the largest difference of an element, ``relative`` the same divided by the largest element, and
    ``states`` the largest difference in each state.
    """

    name: str
    largest: float
    relative: float
    states: Mapping[str, float]


class Comparison:
    """The result of ``compare_eager()``; empty until a step was made. It prints as a table.

    ``differences`` has one entry for each parameter, in order; ``largest`` is the largest of them.
    """

    def __init__(self, compiled: bool = True) -> None:
        if not compiled:
            raise ValueError(
                "compare_eager() compares a compiled step with an eager one, but this optimizer steps eagerly; "
                "construct it with compile=True, and without COMPILED_OPTIM_EAGER in the environment"
            )
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
            for d in worst[:MAX_ROWS]
        ]
        table = tabulate(rows, headers=("compiled - eager", "largest", "relative", "states"), disable_numparse=True)
        rest = len(worst) - MAX_ROWS
        return table + (f"\n... and {rest} more, none of which differs more" if rest > 0 else "")

    def record(self, names: Sequence[str], params: Sequence[Tensor], state: State, twin: EagerTwin) -> None:
        """Record the differences of parameters and states from those of an eager twin."""
        self.differences = tuple(
            _difference(name, (param, state.get(param, {})), (copy, twin.state.get(copy, {})))
            for name, param, copy in zip(names, params, twin.params, strict=True)
        )


class EagerTwin:
    """Copies of the groups and states of an optimizer, on which the same step is made eagerly."""

    def __init__(
        self, rule: Rule, groups: Sequence[Group], state: State, names: Sequence[str], unscale: Tensor | None
    ) -> None:
        copies = {param: _copy(param) for param in all_params(groups)}
        if unscale is not None:  # the step writes to the gradients
            for copy in copies.values():
                copy.grad = None if copy.grad is None else copy.grad.clone()
        self._unscale = unscale
        self._rule = rule
        self._names = names
        self._groups = [{**group, "params": [copies[param] for param in group["params"]]} for group in groups]
        self.params = all_params(self._groups)
        self.state: State = defaultdict(dict)
        for param, values in state.items():
            if param in copies:
                self.state[copies[param]] = {
                    name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()
                }

    def step(self) -> None:
        """Make one eager step on the copies."""
        eager = backends.get("eager")
        grads = local_grads(self.params, lambda: self._names)
        unscales = self._unscale is not None
        names = lambda: self._names  # noqa: E731
        buckets = make_buckets(self._rule, self._groups, self.state, grads, names, lambda _: (eager, False), unscales)
        plan = Plan(self._rule, self._groups, self.state, buckets, grads)
        plan.refresh(self._groups)
        plan.run(grads, False, self._unscale)


def _copy(param: Tensor) -> Tensor:
    copy = torch.nn.Parameter(param.detach().clone(), param.requires_grad)
    copy.grad = param.grad  # shared: a step does not write to gradients, unless it unscales them
    return copy


def _difference(
    name: str, actual: tuple[Tensor, Mapping[str, object]], expected: tuple[Tensor, Mapping[str, object]]
) -> Difference:
    (param, states), (copy, expected_states) = actual, expected
    largest = _distance(param, copy)
    local = local_shard(copy).detach()
    scale = float(local.abs().max()) if local.numel() else 0.0
    pairs = {key: (value, expected_states[key]) for key, value in states.items() if key != "step"}
    differences = {
        key: _distance(value, other)
        for key, (value, other) in pairs.items()
        if isinstance(value, Tensor) and isinstance(other, Tensor)
    }
    return Difference(name, largest, largest / scale if scale else largest, differences)


def _distance(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference of an element. Equal infinities, and NaN in both, count as equal."""
    wide = torch.complex128 if actual.is_complex() else torch.float64
    a, b = (local_shard(tensor).detach().to("cpu", wide) for tensor in (actual, expected))
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, (a - b).abs()).max()) if a.numel() else 0.0
