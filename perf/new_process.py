"""A child process of compile_cost: imports torch, then makes the first step of AdamW, and times both.

It imports nothing else before, so that the second time is what an optimizer adds to ``import torch``. It prints one
line of JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
import time

from perf.workloads import WORKLOADS

COMPILER = ("torch._dynamo", "torch._inductor")


def main(module: str, options: str, workload: str, device: str) -> None:
    """Measure the AdamW of a module, constructed with the options given as JSON."""
    start = time.perf_counter()
    import torch

    imported = time.perf_counter()
    params = [torch.nn.Parameter(torch.ones(shape, device=device)) for shape in WORKLOADS[workload].shapes]
    for param in params:
        param.grad = torch.ones_like(param)
    importlib.import_module(module).AdamW(params, lr=1e-3, **json.loads(options)).step()
    if device != "cpu":
        torch.get_device_module(device).synchronize()
    stepped = time.perf_counter()
    found = [name for name in COMPILER if name in sys.modules]
    print(json.dumps({"import_torch": imported - start, "until_stepped": stepped - imported, "imported": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
