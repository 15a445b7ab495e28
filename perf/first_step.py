"""The child process of compile_cost: runs the first step of one contender on the given workloads, in order.

It prints one line of JSON for each workload. After the first step it runs twenty more, with a schedule of learning rate
and weight decay, and counts the recompiles.
"""

from __future__ import annotations

import json
import sys
import time

import torch

import compiled_optim as co
from perf.contenders import CONTENDERS
from perf.optimizers import RULES
from perf.workloads import WORKLOADS

SCHEDULED_STEPS = 20


def compiled_by_dynamo() -> int:
    """Return the number of graphs that Dynamo has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def first_step(contender: str, workload: str, device: str) -> dict[str, float | int | None]:
    """Measure the first step, including the import of the compiler, and count graphs and recompiles."""
    shapes = WORKLOADS[workload].shapes
    params: list[torch.Tensor] = [torch.nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
    for param in params:
        param.grad = torch.ones_like(param)
    start = time.perf_counter()
    entrant = CONTENDERS[contender].enter(RULES["AdamW"], WORKLOADS[workload].grouped(params))
    entrant.step()
    if device != "cpu":
        torch.get_device_module(device).synchronize()
    seconds = time.perf_counter() - start
    graphs = compiled_by_dynamo()
    for step in range(SCHEDULED_STEPS):
        for group in entrant.optimizer.param_groups:
            lr = 1e-3 / (1 + step)
            group["lr"] = group["lr"].fill_(lr) if isinstance(group["lr"], torch.Tensor) else lr
            # torch.compile specializes on a float weight_decay: each change would recompile
            if isinstance(entrant.optimizer, co.Optimizer):
                group["weight_decay"] = 1e-2 * step
        entrant.step()
    counts: dict[str, int | None]
    if isinstance(entrant.optimizer, co.Optimizer):
        explanation = entrant.optimizer.explain()
        counts = {name: getattr(explanation, name) for name in ("graphs", "kernels", "calls_per_step", "recompiles")}
    else:
        recompiles = compiled_by_dynamo() - graphs
        counts = {"graphs": graphs, "kernels": None, "calls_per_step": None, "recompiles": recompiles}
    return {"seconds": seconds, **counts}


if __name__ == "__main__":
    contender, device, *workloads = sys.argv[1:]
    for workload in workloads:
        print(json.dumps(first_step(contender, workload, device)), flush=True)
