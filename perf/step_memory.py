"""A child process of storage_memory: measures the memory of one contender, and prints it as one line of JSON.

All sizes are in bytes for each parameter. The sizes of ours come from ``explain()``, those of other optimizers from the
tensors in their ``state``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import compiled_optim as co
from perf.cases import DTYPES
from perf.contenders import CONTENDERS
from perf.memory import extra_bytes
from perf.optimizers import RULES
from perf.storages import OPTIMIZER
from perf.workloads import WORKLOADS, elements

WARM_STEPS, MEMORY_STEPS = 3, 5
TOO_SMALL = 5e-3
"""A state with fewer bytes for each parameter, such as the number of steps, is left out."""

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def measure(contender: str, dtype: str, workload: str, device: torch.device) -> dict[str, Any]:
    """Return the sizes of all buffers, the peak of a step above them, and the size of the largest parameter."""
    shapes = WORKLOADS[workload].shapes
    generator = torch.Generator().manual_seed(0)
    params: list[Tensor] = []
    for shape in shapes:
        values = torch.randn(shape, generator=generator).to(device, DTYPES[dtype])
        params.append(torch.nn.Parameter(values * 0.02))
        params[-1].grad = values
    entrant = CONTENDERS[contender].enter(RULES[OPTIMIZER], [params])
    for _ in range(WARM_STEPS):
        entrant.step()
    step = max(extra_bytes(entrant.step, device), resident_growth(entrant.step) if device.type == "cpu" else 0)
    count = elements(shapes)
    return {
        "buffers": {name: size for name, size in buffers(entrant.optimizer, params).items() if size > TOO_SMALL},
        "step": step / count,
        "largest": max(param.nbytes for param in params) / count,
    }


def buffers(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> dict[str, float]:
    """Return the size of the weights, of the gradients and of each state, by name."""
    if isinstance(optimizer, co.Optimizer):
        sizes = optimizer.explain().bytes_per_element
        return {"weights": sizes.pop("parameters"), "gradients": sizes.pop("gradients"), **sizes}
    used: Counter[str] = Counter(
        weights=memory_of(params), gradients=memory_of(param.grad for param in params if param.grad is not None)
    )
    names = {name for state in optimizer.state.values() for name in state}
    for name in sorted(names):
        values = [state[name] for state in optimizer.state.values() if name in state]
        used[name] = memory_of(value for value in values if isinstance(value, Tensor))
    count = sum(param.numel() for param in params)
    return {name: size / count for name, size in used.items()}


def memory_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors. Memory that several share is counted once; a subclass has that of its parts."""
    parts: dict[int, int] = {}
    todo = list(tensors)
    while todo:
        tensor = todo.pop()
        if hasattr(tensor, "__tensor_flatten__"):
            todo += [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        else:
            parts[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(parts.values())


def resident_growth(step: Callable[[], object]) -> int:
    """Return how far the resident memory of the process rises in a step. It is 0 where Linux does not tell.

    Linux may take other pages from the process in the meantime, which hides a rise. So it is the largest of some steps.
    """
    growth = 0
    for _ in range(MEMORY_STEPS):
        try:
            CLEAR_REFS.write_text("5")  # resets the peak
            before = _status("VmRSS")
        except (OSError, ValueError):
            return 0
        step()
        growth = max(growth, _status("VmHWM") - before)
    return growth


def _status(field: str) -> int:
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    contender, dtype, workload, device = sys.argv[1:]
    print(json.dumps(measure(contender, dtype, workload, torch.device(device))))
