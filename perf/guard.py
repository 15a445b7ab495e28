"""What the reallocation guard costs: ``python -m perf.guard`` steps an optimizer with and without it, by turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from tabulate import tabulate

import compiled_optim as co
from perf.workloads import WORKLOADS

ROUNDS = {"tiny_mlp": 3000, "thousand_tensors": 150}
OPTIMIZERS: list[Callable[..., co.Optimizer]] = [co.SGD, co.AdamW]
GUARD = co.Optimizer._in_place


class Model(torch.nn.Module):
    """One submodule for each tensor: as many places to look into as there can be."""

    def __init__(self, workload: str) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in WORKLOADS[workload]())
        for layer, shape in zip(self.layers, WORKLOADS[workload](), strict=True):
            layer.weight = torch.nn.Parameter(torch.randn(shape))
            layer.weight.grad = torch.randn(shape)


def unguarded(*_: object) -> bool:
    """Stands in for the guard and looks at nothing."""
    return True


def seconds(optimizer: co.Optimizer, guard: Callable[..., bool]) -> float:
    """One step under this guard."""
    co.Optimizer._in_place = guard  # type: ignore[method-assign]
    try:
        start = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - start
    finally:
        co.Optimizer._in_place = GUARD  # type: ignore[method-assign]


def measure(workload: str, make: Callable[..., co.Optimizer], watched: bool) -> list[object]:
    """Median microseconds of a step with and without the guard, its share, and the difference for each tensor."""
    model = Model(workload)
    optimizer = make(model if watched else model.parameters())
    optimizer.step()
    pairs = [(seconds(optimizer, GUARD), seconds(optimizer, unguarded)) for _ in range(ROUNDS[workload])]
    on, off = (statistics.median(times) * 1e6 for times in zip(*pairs, strict=True))
    each = (on - off) / len(model.layers)
    label = "module" if watched else "parameters"
    return [workload, type(optimizer).__name__, label, f"{on:.0f}", f"{off:.0f}", f"{1 - off / on:.1%}", f"{each:.2f}"]


def main() -> None:
    """Print the table."""
    rows = [measure(workload, make, w) for workload in ROUNDS for make in OPTIMIZERS for w in (False, True)]
    headers = ["workload", "optimizer", "given", "guard on, µs", "off, µs", "share", "µs a tensor"]
    print(tabulate(rows, headers=headers, disable_numparse=True))


if __name__ == "__main__":
    main()
