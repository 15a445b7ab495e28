"""Measure what a further optimizer costs in a process that has compiled its code: its construction, its first step.

New parameters are made for each measurement. The contenders take turns. The first round is not counted: it compiles.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from perf.contenders import CONTENDERS, OURS, Contender
from perf.optimizers import RULES
from perf.race import ratio, spread
from perf.report import HostCost
from perf.workloads import TWO_HUNDRED, WORKLOADS, Workload

ROUNDS = 30
RULE = RULES["AdamW"]


def construct(contender: Contender, groups: list[list[Tensor]]) -> Callable[[], object]:
    """Return the call that constructs the optimizer."""
    return lambda: contender.construct(RULE, groups)


def first_step(contender: Contender, groups: list[list[Tensor]]) -> Callable[[], object]:
    """Construct the optimizer and return the call of its first step."""
    return contender.enter(RULE, groups).step


@dataclass(frozen=True)
class Measurement:
    """A call that is measured for ours and for the baseline."""

    what: str
    prepare: Callable[[Contender, list[list[Tensor]]], Callable[[], object]]
    workload: Workload
    baseline: str


MEASUREMENTS = [
    # without foreach and fused, as torch.optim.AdamW is constructed by default on the CPU
    Measurement("construct over 200 groups of one tensor", construct, WORKLOADS["many_groups"], "torch loop"),
    Measurement("first step of a second optimizer, 200 tensors", first_step, Workload("", TWO_HUNDRED), "torch fused"),
]


def measure(device: str, rounds: int = ROUNDS) -> Iterator[HostCost]:
    """Run all measurements and yield a result for each contender."""
    for measurement in MEASUREMENTS:
        names = [OURS, measurement.baseline]
        seconds: dict[str, dict[int, float]] = {name: {} for name in names}
        for done in range(rounds + 1):
            for name in random.Random(done).sample(names, len(names)):
                groups = measurement.workload.grouped(parameters(measurement.workload, device))
                seconds[name][done] = wall_seconds(measurement.prepare(CONTENDERS[name], groups), device)
        for name in names:
            del seconds[name][0]
        for name in names:
            against = ratio(seconds[name], seconds[measurement.baseline])
            yield HostCost(
                measurement.what, name, rounds, spread(seconds[name].values()), measurement.baseline, against
            )


def parameters(workload: Workload, device: str) -> list[Tensor]:
    """Return new parameters with gradients."""
    params: list[Tensor] = [torch.nn.Parameter(torch.ones(shape, device=device)) for shape in workload.shapes]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def wall_seconds(call: Callable[[], object], device: str) -> float:
    """Return the seconds of a call, until the device is done. What the call returns is freed after the measurement."""
    start = time.perf_counter()
    kept = call()
    if device != "cpu":
        torch.get_device_module(device).synchronize()
    seconds = time.perf_counter() - start
    del kept
    return seconds
