"""A race on the CPU, and command line arguments for a short one, that the tests of the perf report share."""

from __future__ import annotations

import torch

from perf.cases import Case
from perf.race import Length, Race

CPU = torch.device("cpu")
QUICK = ["--workload", "tiny_mlp", "--rounds", "3", "--no-thread-scaling", "--no-compile-cost", "--no-memory"]
EAGER = ["ours eager", "torch foreach", "torch loop", "usual foreach", "adamp", "schedulefree"]


def race(memory, optimizer, contenders, workload="small", dtype="float32", rounds=3):
    made = Race(Case(workload, optimizer, dtype), CPU, memory, Length(rounds), contenders)
    made.run(lambda what, fraction: None)
    return {row.contender: row for row in made.rows()}
