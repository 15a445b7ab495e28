"""A first report: step times against torch.optim and other implementations, and what compiling costs.

Contenders take turns round by round in one process, on copies of the same parameters with fresh gradients, and each is
checked against the others before it is timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from adamp import AdamP as PublishedAdamP
from tabulate import tabulate

import compiled_optim as co
from perf.peers import ForeachLamb
from perf.workloads import WORKLOADS

OPTIMIZERS: dict[str, dict[str, Any]] = {"SGD": {"lr": 1e-3, "momentum": 0.9}, "Adam": {}, "AdamW": {}}
CASES = [
    *((workload, name) for workload in ("tiny_mlp", "thousand_tensors", "resnet50") for name in OPTIMIZERS),
    ("gpt2_small", "AdamW"),
]
SECONDS_PER_CASE = 5.0

Maker = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
USUAL: dict[str, tuple[Maker, Maker]] = {
    "AdamP": (lambda p: co.AdamP(p, weight_decay=0.01), lambda p: PublishedAdamP(p, weight_decay=0.01)),
    "Lamb": (lambda p: co.Lamb(p, weight_decay=0.01), lambda p: ForeachLamb(p, weight_decay=0.01)),
    "BertAdam": (co.BertAdam, lambda p: ForeachLamb(p, weight_decay=0.01, trust=False, clip=1.0)),
    "Adadelta": (co.Adadelta, lambda p: torch.optim.Adadelta(p, foreach=True)),
    "RMSprop": (co.RMSprop, lambda p: torch.optim.RMSprop(p, foreach=True)),
}


class Contender:
    """An optimizer over its own copy of a workload's parameters."""

    def __init__(self, make: Maker, values: list[torch.Tensor]) -> None:
        self.params = [torch.nn.Parameter(value.clone()) for value in values]
        self.optimizer = make(self.params)
        self.seconds: list[float] = []

    def step(self, grads: list[torch.Tensor]) -> float:
        """One step with fresh copies of the gradients; returns the seconds until the device has done the step."""
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad.clone()
        wait(grads[0].device)
        start = time.perf_counter()
        self.optimizer.step()
        wait(grads[0].device)
        return time.perf_counter() - start


def wait(device: torch.device) -> None:
    """Wait for all that was launched on an accelerator."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def contenders(name: str, values: list[torch.Tensor]) -> dict[str, Contender]:
    """Ours, and torch's three implementations."""
    ours, theirs, options = getattr(co, name), getattr(torch.optim, name), OPTIMIZERS[name]
    makers: dict[str, Maker] = {
        "ours": lambda p: ours(p, **options),
        "ours eager": lambda p: ours(p, **options, compile=False),
        "torch fused": lambda p: theirs(p, **options, fused=True),
        "torch foreach": lambda p: theirs(p, **options, foreach=True),
        "torch loop": lambda p: theirs(p, **options, foreach=False),
    }
    return {key: Contender(make, values) for key, make in makers.items()}


def against_the_usual(name: str, values: list[torch.Tensor]) -> dict[str, Contender]:
    """Ours, and the implementation people use."""
    ours, theirs = USUAL[name]
    return {"ours": Contender(ours, values), "usual": Contender(theirs, values)}


def race(
    workload: str, enter: Callable[[list[torch.Tensor]], dict[str, Contender]], seconds: float, device: str
) -> dict[str, Contender]:
    """Time the contenders on one workload in turn, after making sure that they compute the same."""
    generator = torch.Generator().manual_seed(0)
    values, grads = (
        [torch.randn(shape, generator=generator).to(device) for shape in WORKLOADS[workload]()] for _ in range(2)
    )
    field = enter(values)
    for _ in range(2):  # warm up, and make sure that all of them really step
        for contender in field.values():
            contender.step(grads)
    for key, contender in field.items():
        for a, b in zip(contender.params, field["ours"].params, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=f"{key} computes something else")
    stop = time.perf_counter() + seconds
    while len(field["ours"].seconds) < 5 or time.perf_counter() < stop:
        for contender in field.values():
            contender.seconds.append(contender.step(grads))
    return field


def row(workload: str, name: str, field: dict[str, Contender], baseline: str) -> list[object]:
    """Median milliseconds of each, and the ratio of ours to the baseline with its quartiles."""
    medians = {key: statistics.median(contender.seconds) for key, contender in field.items()}
    ratios = [a / b for a, b in zip(field["ours"].seconds, field[baseline].seconds, strict=True)]
    low, _, high = statistics.quantiles(ratios)
    ratio = f"{medians['ours'] / medians[baseline]:.2f} ({low:.2f}-{high:.2f})"
    return [workload, name, *(f"{seconds * 1e3:.3f}" for seconds in medians.values()), ratio, len(ratios)]


FIRST_STEP = """
import sys, time, torch, compiled_optim as co
from perf.workloads import WORKLOADS
params = [torch.nn.Parameter(torch.zeros(shape, device=sys.argv[2])) for shape in WORKLOADS[sys.argv[1]]()]
for param in params:
    param.grad = torch.ones_like(param)
optimizer = co.AdamW(params)
start = time.perf_counter()
optimizer.step()
print(time.perf_counter() - start, optimizer.explain().graphs, optimizer.explain().calls_per_step)
"""


def first_step(workload: str, cache: str, device: str) -> list[object]:
    """Seconds, graphs and calls of the first step in a process of its own."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    command = [sys.executable, "-c", FIRST_STEP, workload, device]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    seconds, graphs, calls = output.split()
    return [f"{float(seconds):.1f}", int(graphs), int(calls)]


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="python -m perf", description=__doc__)
    parser.add_argument("--device", default="cpu", help="the device type to measure: cpu, cuda, npu")
    device = parser.parse_args().device
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, {device}\n")
    headers = ["workload", "optimizer", *contenders("SGD", [torch.zeros(1)]), "ours/fused (quartiles)", "rounds"]
    rows = [
        row(workload, name, race(workload, partial(contenders, name), SECONDS_PER_CASE, device), "torch fused")
        for workload, name in CASES
    ]
    print("Step time in ms, median:\n")
    print(tabulate(rows, headers=headers, disable_numparse=True))
    print("\nAgainst the usual implementation: pip's adamp, a foreach Lamb and BertAdam, torch's foreach:\n")
    rows = [
        row(workload, name, race(workload, partial(against_the_usual, name), 3.0, device), "usual")
        for workload in ("resnet50", "gpt2_small")
        for name in USUAL
    ]
    headers = ["workload", "optimizer", "ours", "usual", "ours/usual (quartiles)", "rounds"]
    print(tabulate(rows, headers=headers, disable_numparse=True))
    print("\nFirst step of AdamW, importing the compiler included:\n")
    rows = []
    for workload in ("tiny_mlp", "thousand_tensors", "gpt2_small"):
        with tempfile.TemporaryDirectory() as cache:
            rows.append([workload, "empty", *first_step(workload, cache, device)])
            if workload == "gpt2_small":
                rows.append(["resnet50", "after gpt2_small", *first_step("resnet50", cache, device)])
                rows.append(["gpt2_small", "after both", *first_step("gpt2_small", cache, device)])
    print(tabulate(rows, headers=["model", "cache", "seconds", "graphs", "calls per step"], disable_numparse=True))


if __name__ == "__main__":
    main()
