"""Train with each storage and compare the final losses: ``python -m perf.convergence``.

Two small models, three seeds each, AdamW in float32, with 8-bit states, and with bfloat16 weights that are rounded
stochastically, with Kahan's compensation, and to nearest. A seed chooses the first weights and the batches. Forward and
backward compute in float32 for every storage, so that nothing differs but what the optimizer keeps and how it rounds.
It takes about five minutes on two cores, prints a table and writes a plot.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import compiled_optim as co
from perf.learning_tasks import TASKS, Task


@dataclass(frozen=True)
class Way:
    """A dtype of the weights, and options of AdamW."""

    dtype: torch.dtype
    options: Mapping[str, Any]


WAYS = {
    "float32": Way(torch.float32, {}),
    "8-bit states": Way(torch.float32, {"state_dtype": "8bit"}),
    "bf16, stochastic": Way(torch.bfloat16, {"rounding": "stochastic"}),
    "bf16, kahan": Way(torch.bfloat16, {"rounding": "kahan"}),
    "bf16, nearest": Way(torch.bfloat16, {}),
}
REFERENCE = "float32"
SEEDS = (0, 1, 2)
EVALUATED = 24
"""Batches of an evaluation, the same in all runs."""

POINTS = 12
"""Evaluations of a run."""

WARMUP, LAST = 0.05, 0.02
"""The learning rate rises in this part of the steps, then falls as a cosine to LAST of its largest value."""


@dataclass
class Run:
    """The losses on held-out batches: after some steps, and at the end."""

    steps: list[int]
    losses: list[float]

    @property
    def final(self) -> float:
        """The loss after the last step."""
        return self.losses[-1]


def train(task: Task, way: Way, seed: int, steps: int) -> Run:
    """Train a model and return its losses."""
    torch.manual_seed(seed)
    model = task.model().to(way.dtype)
    optimizer = co.AdamW(model, lr=task.lr, weight_decay=0.01, **way.options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step / steps))
    batches = torch.Generator().manual_seed(seed)
    run = Run([], [])
    for step in range(1, steps + 1):
        loss_of(model, *task.batch(batches)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % max(steps // POINTS, 1) == 0 or step == steps:
            run.steps.append(step)
            run.losses.append(evaluate(task, model))
    return run


def rate(progress: float) -> float:
    """Return the learning rate relative to its largest value."""
    if progress < WARMUP:
        return (progress + 0.01) / (WARMUP + 0.01)
    return LAST + (1 - LAST) * (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP))) / 2


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss, computed in float32 from the weights as they are stored."""
    weights = {name: param.float() for name, param in model.named_parameters()}
    return cross_entropy(functional_call(model, weights, (inputs,)), targets)


@torch.no_grad()
def evaluate(task: Task, model: nn.Module) -> float:
    """Return the mean loss on held-out batches."""
    generator = torch.Generator().manual_seed(12345)
    return statistics.fmean(float(loss_of(model, *task.batch(generator, held_out=True))) for _ in range(EVALUATED))


Results = dict[str, dict[str, list[Run]]]
"""The runs by the name of the task and of the storage."""


def run_all(tasks: Mapping[str, Task], seeds: Sequence[int], steps: int | None) -> Results:
    """Make all runs, with a progress bar."""
    results: Results = {name: {way: [] for way in WAYS} for name in tasks}
    plan = [(name, seed, way) for name in tasks for seed in seeds for way in WAYS]
    for name, seed, way in tqdm(plan, file=sys.stderr, bar_format="{percentage:3.0f}%|{bar:30}| {elapsed}"):
        task = tasks[name]
        results[name][way].append(train(task, WAYS[way], seed, steps or task.steps))
    return results


def table(results: Results) -> str:
    """Return a table of final losses: of each seed, mean, spread (largest - smallest), and the mean against float32."""
    rows = []
    for name, ways in results.items():
        finals = {way: [run.final for run in runs] for way, runs in ways.items()}
        for way, losses in finals.items():
            apart = statistics.fmean(losses) - statistics.fmean(finals[REFERENCE])
            within = abs(apart) <= max(finals[REFERENCE]) - min(finals[REFERENCE])
            rows.append([
                TASKS[name].title,
                way,
                *(f"{loss:.4f}" for loss in losses),
                f"{statistics.fmean(losses):.4f}",
                f"{max(losses) - min(losses):.4f}",
                *(("", "") if way == REFERENCE else (f"{apart:+.4f}", "yes" if within else "no")),
            ])  # fmt: skip
    seeds = len(next(iter(results.values()))[REFERENCE])
    each = [f"seed {seed}" for seed in range(seeds)]
    headers = ["task", "storage", *each, "mean", "spread", "mean - float32", "within its spread"]
    return tabulate(rows, headers=headers, disable_numparse=True)


COLORS = {
    "float32": "#1f3a5f",
    "8-bit states": "#c8102e",
    "bf16, stochastic": "#e8a33d",
    "bf16, kahan": "#4f8a5b",
    "bf16, nearest": "#8a8a8a",
}


def draw(results: Results, path: Path) -> None:
    """Plot the losses: the mean of the seeds as a line, their range as a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=110)
    figure.set_layout_engine("constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, (name, ways) in zip(panels, results.items(), strict=True):
        for way, runs in ways.items():
            steps = runs[0].steps
            width = 4.5 if way == REFERENCE else 1.6  # the others lie on it
            columns = list(zip(*(run.losses for run in runs), strict=True))
            axes.fill_between(steps, list(map(min, columns)), list(map(max, columns)), color=COLORS[way], alpha=0.2)
            axes.plot(steps, list(map(statistics.fmean, columns)), color=COLORS[way], label=way, linewidth=width)
        seen = [loss for runs in ways.values() for run in runs for loss in run.losses[len(run.losses) // 4 :]]
        margin = 0.05 * (max(seen) - min(seen))
        axes.set_ylim(min(seen) - margin, max(seen) + margin)
        axes.set_title(TASKS[name].title, fontsize=11)
        axes.set_xlabel("step")
        axes.set_ylabel(f"loss on held-out data, {TASKS[name].unit}")
        axes.grid(color="#e5e5e5")
        axes.legend(frameon=False)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print the table and write the plot."""
    parser = argparse.ArgumentParser(prog="python -m perf.convergence", description=__doc__)
    parser.add_argument("--task", action="append", choices=list(TASKS), help="only this task; may be repeated")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help=f"number of seeds; default: {len(SEEDS)}")
    parser.add_argument("--steps", type=int, help="steps of a run; default: those of the task")
    parser.add_argument("--plot", type=Path, default=Path("docs/convergence.png"), help="default: docs/convergence.png")
    given = parser.parse_args(arguments)
    results = run_all({name: TASKS[name] for name in given.task or TASKS}, range(given.seeds), given.steps)
    print(table(results))
    draw(results, given.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
