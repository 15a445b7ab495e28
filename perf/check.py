"""Check the results of a contender: compare its first steps with the same steps in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from perf.contenders import CONTENDERS, REFERENCES, not_entered
from perf.noise import Noise
from perf.optimizers import Rule
from perf.workloads import Workload

TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.25}
"""The largest deviation from the reference, relative to the length of the steps. It is 1 if nothing was stepped.

The tolerance cannot be tighter: on the CPU, torch's norm of 40 million float32 elements has a relative error of 1e-3,
and Lamb divides by that norm.
"""


def reference(rule: Rule, noise: Noise, workload: Workload) -> Tensor:
    """Return the parameters after the untimed steps, as one flat tensor.

    The first available entry of REFERENCES computes them in float64 on the CPU, because not every device supports
    float64. It steps one tensor at a time if the rule has no norm over all gradients, because float64 copies of a whole
    model need more memory than everything else here.
    """
    made = next(CONTENDERS[name] for name in REFERENCES if not_entered(name, rule, "cpu", 0, asked=True) is None)
    starts = noise.cut(noise.start())
    steps = range(1, 1 + workload.untimed)
    given, windows = [workload.with_gradients(step) for step in steps], [noise.window(step) for step in steps]
    places = range(len(starts))
    ends: list[Tensor] = []
    for part in [list(places)] if rule.norm else [[place] for place in places]:
        params: list[Tensor] = [torch.nn.Parameter(starts[place].cpu().double()) for place in part]
        entrant = made.enter(rule, workload.grouped(params) if rule.norm else [params])
        for grads, present in zip(windows, given, strict=True):
            for param, place in zip(params, part, strict=True):
                param.grad = grads[place].cpu().double() if present[place] else None
            entrant.step()
        ends += [param.detach().float() for param in params]
    return flat(ends).to(noise.pool.device)


def untouched(before: Sequence[Tensor], after: Sequence[Tensor], present: Sequence[bool]) -> bool:
    """Return whether a step kept the values of all tensors that had no gradient."""
    return all(had or torch.equal(old, new) for old, new, had in zip(before, after, present, strict=True))


def judge(start: Tensor, end: Tensor, expected: Tensor, tolerance: float | None = None) -> tuple[float, str]:
    """Return the deviation relative to the length of the steps, and an error message or an empty string."""
    deviation = float((end - expected).norm() / (expected - start).norm())
    if deviation <= (TOLERANCE[end.dtype] if tolerance is None else tolerance):
        return deviation, ""
    if torch.equal(start, end):
        return deviation, "did not step: the parameters are what they were"
    return deviation, f"computes something else: {deviation:.2g} away from the float64 reference"


def flat(params: Sequence[Tensor]) -> Tensor:
    """Concatenate all parameters into one flat tensor."""
    return torch.cat([param.detach().view(-1) for param in params])
