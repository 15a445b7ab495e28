"""Measure steps inside backward and averages of the weights: ``python -m perf.training``.

The first table compares whole iterations with ``in_backward=True`` and without it. The second compares the memory of
the gradients: the most bytes that all of them take at one time, and the peak of the process, in a new process each.
The third compares a step with ``ema_decay``, a step without, and a step followed by ``torch._foreach_lerp_``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from tabulate import tabulate
from torch import Tensor, nn

import compiled_optim as co
from perf.race import spread
from perf.workloads import WORKLOADS

MIB = 1 << 20
ROUNDS = 15


def transformer() -> tuple[nn.Module, Tensor]:
    """Return a transformer of 24 layers and a batch. Its gradients are about 30 % of the memory of training."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 24, enable_nested_tensor=False), torch.randn(1, 32, 512)


def convolutions() -> tuple[nn.Module, Tensor]:
    """Return a network of convolutions and normalisations, shaped like a small ResNet without its shortcuts."""
    torch.manual_seed(0)
    widths = [3, 64, 64, 64, 128, 128, 256, 256, 512, 512]
    layers: list[nn.Module] = []
    for number, (inner, outer) in enumerate(pairwise(widths)):
        stride = 2 if number in (0, 3, 5, 7) else 1
        layers += [nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]
    return nn.Sequential(*layers), torch.randn(8, 3, 64, 64)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"transformer": transformer, "convolutions": convolutions}


def iterate(model: nn.Module, batch: Tensor, optimizer: torch.optim.Optimizer) -> float:
    """Make one iteration; return the seconds of backward and step."""
    loss = model(batch).square().mean()
    start = time.perf_counter()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start


def race(contenders: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Run contenders by turns; return the seconds of each round."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(ROUNDS + 3):
        for name in sorted(contenders, reverse=number % 2 == 0):
            seconds = contenders[name]()
            if number >= 3:
                times[name].append(seconds)
    return times


def ratio(some: Sequence[float], others: Sequence[float]) -> str:
    """Format the median of the ratios of single rounds, with quartiles."""
    found = spread([a / b for a, b in zip(some, others, strict=True)])
    return f"{found.median:.2f} ({found.low:.2f}–{found.high:.2f})"


def iteration_times() -> list[list[str]]:
    """Return a table row for each model: backward and step, in ms, with in_backward and without."""
    rows = []
    for name, make in MODELS.items():
        contenders = {}
        for in_backward in (True, False):
            model, batch = make()
            optimizer = co.AdamW(model, in_backward=in_backward)
            key = "in backward" if in_backward else "ordinary"
            contenders[key] = partial(iterate, model, batch, optimizer)
        times = race(contenders)
        own, other = times["in backward"], times["ordinary"]
        rows.append([name, f"{median(own) * 1e3:.1f}", f"{median(other) * 1e3:.1f}", ratio(own, other)])
    return rows


def gradient_memory(in_backward: bool) -> dict[str, float]:
    """Return, in MiB: the weights, the largest two layers, the most that gradients take, the peak of the process."""
    model, batch = transformer()
    layers = [sum(param.nbytes for param in layer.parameters()) for layer in model.layers]  # type: ignore
    params = list(model.parameters())
    optimizer = co.AdamW(model, in_backward=in_backward)
    most = 0

    def look(new: Tensor) -> None:
        """Add up the gradients that exist when another one has been computed."""
        nonlocal most
        most = max(most, new.nbytes + sum(param.grad.nbytes for param in params if param.grad is not None))

    for param in params:
        param.register_hook(look)  # type: ignore[no-untyped-call]
    for _ in range(3):
        iterate(model, batch, optimizer)
    weights = sum(param.nbytes for param in params)
    sizes = {"weights": weights, "two layers": sum(sorted(layers)[-2:]), "gradients": most, "peak": peak_of_process()}
    return {name: size / MIB for name, size in sizes.items()}


def peak_of_process() -> int:
    """Return the most bytes that this process has had in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def memory_rows() -> list[list[str]]:
    """Return a table row for in_backward and one for the ordinary loop, each measured in a new process."""
    rows = []
    for flag in ("yes", "no"):
        command = [sys.executable, "-m", "perf.training", "--gradient-memory", flag]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        rows.append(["in backward" if flag == "yes" else "ordinary", *(f"{value:.0f}" for value in found.values())])
    return rows


def average_times() -> list[list[str]]:
    """Return a table row for each workload: a step with an average, without, and followed by a pass of its own."""
    rows = []
    for workload in ("tiny_mlp", "resnet50", "gpt2_small"):
        contenders: dict[str, Callable[[], float]] = {}
        for name, options in {"average": {"ema_decay": 0.999}, "none": {}, "separate": {}}.items():
            params = [nn.Parameter(torch.randn(shape)) for shape in WORKLOADS[workload].shapes]
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer = co.AdamW(params, **options)  # type: ignore[arg-type]
            averages = [param.detach().clone() for param in params] if name == "separate" else []
            contenders[name] = partial(_step, optimizer, params, averages)
        times = race(contenders)
        columns = [f"{median(times[name]) * 1e3:.3g}" for name in contenders]
        rows.append([workload, *columns, *(ratio(times["average"], times[name]) for name in ("none", "separate"))])
    return rows


@torch.no_grad()
def _step(optimizer: co.Optimizer, params: Sequence[Tensor], averages: list[Tensor]) -> float:
    start = time.perf_counter()
    optimizer.step()
    if averages:
        torch._foreach_lerp_(averages, list(params), 0.001)
    return time.perf_counter() - start


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gradient-memory", choices=("yes", "no"), help="print only this measurement, as JSON")
    arguments = parser.parse_args()
    if arguments.gradient_memory:
        print(json.dumps(gradient_memory(arguments.gradient_memory == "yes")))
        return
    headers = ["model", "in backward, ms", "ordinary, ms", "ratio"]
    print(tabulate(iteration_times(), headers=headers, disable_numparse=True))
    headers = ["MiB, transformer", "weights", "largest two layers", "gradients at most", "peak of the process"]
    print("\n" + tabulate(memory_rows(), headers=headers, disable_numparse=True))
    headers = ["workload", "average, ms", "none, ms", "separate pass, ms", "average / none", "average / separate"]
    print("\n" + tabulate(average_times(), headers=headers, disable_numparse=True))


if __name__ == "__main__":
    main()
