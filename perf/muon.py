"""Measure Muon against torch.optim.Muon on matrices: ``python -m perf.muon --rounds 15``.

Both step the same matrices in turns, and the medians of the rounds are compared. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import compiled_optim as co

Shapes = list[tuple[int, ...]]

D = 256
WORKLOADS: dict[str, Shapes] = {
    "200 matrices of 64x64": [(64, 64)] * 200,
    "12 layers of a transformer, d=256": [(3 * D, D), (D, D), (4 * D, D), (D, 4 * D)] * 12,
}
CONTENDERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"torch": torch.optim.Muon, "ours": co.Muon}


def made(name: str, shapes: Shapes) -> torch.optim.Optimizer:
    """Return an optimizer whose parameters have gradients, after two steps."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer = CONTENDERS[name](params, lr=0.02)
    for _ in range(2):
        optimizer.step()
    return optimizer


def medians(shapes: Shapes, rounds: int) -> dict[str, float]:
    """Return the median time of a step in milliseconds, by contender."""
    optimizers = {name: made(name, shapes) for name in CONTENDERS}
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.step()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(own) for name, own in times.items()}


def main() -> None:
    """Print a line for each workload."""
    parser = argparse.ArgumentParser(description="Measure Muon against torch.optim.Muon.")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each optimizer, by turns")
    rounds = parser.parse_args().rounds
    for label, shapes in WORKLOADS.items():
        found = medians(shapes, rounds)
        ratio = found["ours"] / found["torch"]
        print(f"{label}: torch {found['torch']:.1f} ms, ours {found['ours']:.1f} ms, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
