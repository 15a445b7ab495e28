"""Whether a contender computes what it should: its first steps against the same steps in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from perf.contenders import CONTENDERS, REFERENCES, not_entered
from perf.noise import Noise
from perf.optimizers import Rule

CHECKED_STEPS = 2
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.25}
"""How far the checked steps may be from the reference, relative to their length; one that did not step is at 1.

Not tighter: torch's own norm of 40 million float32 elements is off by a thousandth on the CPU, and Lamb divides by it.
"""


def reference(rule: Rule, noise: Noise) -> Tensor:
    """Where the checked steps lead, as one flat tensor.

    Computed in float64 by the first of REFERENCES there is, on the CPU, because not every device has float64; tensor by
    tensor if the rule lets us, because float64 copies of a whole model take more memory than all else here.
    """
    made = next(CONTENDERS[name] for name in REFERENCES if not_entered(name, rule, "cpu", 0, asked=True) is None)
    starts, windows = noise.cut(noise.start()), [noise.window(step) for step in range(1, 1 + CHECKED_STEPS)]
    places = range(len(starts))
    ends: list[Tensor] = []
    for part in [list(places)] if rule.norm else [[place] for place in places]:
        params: list[Tensor] = [torch.nn.Parameter(starts[place].cpu().double()) for place in part]
        entrant = made.enter(rule, params)
        for grads in windows:
            for param, place in zip(params, part, strict=True):
                param.grad = grads[place].cpu().double()
            entrant.step()
        ends += [param.detach().float() for param in params]
    return flat(ends).to(noise.pool.device)


def judge(start: Tensor, end: Tensor, expected: Tensor) -> tuple[float, str]:
    """How far the steps ended from where they should, relative to their length, and what is wrong with that if any."""
    deviation = float((end - expected).norm() / (expected - start).norm())
    if deviation <= TOLERANCE[end.dtype]:
        return deviation, ""
    if torch.equal(start, end):
        return deviation, "did not step: the parameters are what they were"
    return deviation, f"computes something else: {deviation:.2g} away from the float64 reference"


def flat(params: Sequence[Tensor]) -> Tensor:
    """All parameters in one tensor."""
    return torch.cat([param.detach().view(-1) for param in params])
