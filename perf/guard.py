"""Measure the cost of the reallocation guard: ``python -m perf.guard`` alternates steps with and without it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from tabulate import tabulate

import compiled_optim as co
from compiled_optim.guard.check import Match
from perf.race import spread
from perf.workloads import WORKLOADS

ROUNDS = {"tiny_mlp": 3000, "thousand_tensors": 150}
OPTIMIZERS: list[Callable[..., co.Optimizer]] = [co.SGD, co.AdamW]


class Model(torch.nn.Module):
    """A model with one submodule for each tensor, the most submodules that the guard can have to visit."""

    def __init__(self, workload: str) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in WORKLOADS[workload].shapes)
        for layer, shape in zip(self.layers, WORKLOADS[workload].shapes, strict=True):
            layer.weight = torch.nn.Parameter(torch.randn(shape))
            layer.weight.grad = torch.randn(shape)


def seconds(optimizer: co.Optimizer) -> float:
    """Return the seconds of one step."""
    start = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - start


def made(workload: str, make: Callable[..., co.Optimizer], watched: bool, guarded: bool) -> co.Optimizer:
    """Return an optimizer after its first step."""
    model = Model(workload)
    optimizer = make(model if watched else model.parameters())
    optimizer.step()
    if not guarded:
        stepper = optimizer._stepper
        assert stepper._guard is not None
        stepper._guard.match = lambda *_: Match.ALL  # type: ignore[method-assign]
        stepper.tracker.modules_unchanged = lambda: True  # type: ignore[method-assign]
    return optimizer


def measure(workload: str, make: Callable[..., co.Optimizer], watched: bool) -> list[object]:
    """Return a table row: median microseconds with and without the guard, its share, and the cost per tensor.

    The share has its quartiles over the rounds. The two optimizers take turns in being first.
    """
    pair = [made(workload, make, watched, guarded) for guarded in (True, False)]
    times = []
    for number in range(ROUNDS[workload]):
        order = (0, 1) if number % 2 else (1, 0)
        taken = {place: seconds(pair[place]) for place in order}
        times.append((taken[0], taken[1]))
    on, off = (statistics.median(column) * 1e6 for column in zip(*times, strict=True))
    each = (on - off) / len(WORKLOADS[workload].shapes)
    given = "module" if watched else "parameters"
    name = type(pair[0]).__name__
    share = spread([1 - without / with_guard for with_guard, without in times])
    quartiles = f"{share.median:.1%} ({share.low:.1%}–{share.high:.1%})"
    return [workload, name, given, f"{on:.0f}", f"{off:.0f}", quartiles, f"{each:.2f}"]


def main() -> None:
    """Measure all combinations and print the table."""
    rows = [measure(workload, make, w) for workload in ROUNDS for make in OPTIMIZERS for w in (False, True)]
    headers = ["workload", "optimizer", "given", "guard on, µs", "off, µs", "share", "µs a tensor"]
    print(tabulate(rows, headers=headers, disable_numparse=True))


if __name__ == "__main__":
    main()
