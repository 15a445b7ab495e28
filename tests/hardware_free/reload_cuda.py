"""Script: step with the CUDA backend in Triton's interpreter, and print where its units came from.

Run it twice with one cache directory. The first process compiles with Inductor. The second one has the argument
``reload``: it gets no part of Inductor, so it has to find the units on disk.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import compiled_optim as co
from compiled_optim.backends import Signature, disk_cache
from tests.hardware_free import steps, triton_math
from tests.hardware_free.host_cuda import HostCuda

NAMES = ("AdamW", "Lamb", "AdamP")


def stepped(name: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(17,), (40, 33)]]
    optimizer = getattr(co, name)(params, lr=0.1, backend=HostCuda())
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()
    values = [value for param in params for value in param.flatten().tolist()]
    return {"values": values, "sources": [unit.source for unit in optimizer.explain().units]}


def environment(reload: bool) -> Any:
    """Return a context with a GPU's properties; for the first process, one in which Inductor compiles for it."""
    if reload:
        # as in gpuless_cuda, which cannot be used here because it imports Inductor
        properties = mock.Mock(major=8, minor=0, multi_processor_count=108)
        properties.name = "none"
        return mock.patch.object(torch.cuda, "get_device_properties", return_value=properties)
    from tests.hardware_free.gpuless_cuda import gpuless_cuda

    return gpuless_cuda()


def settings(reload: bool) -> Any:
    """Return a context in which Inductor has its default settings, as in a process that does not import it."""
    if reload:
        return nullcontext()
    from torch._inductor import config

    return config.patch(force_disable_caches=False, use_static_triton_launcher=True)


def main() -> None:
    triton_math.install()
    reload = sys.argv[1:] == ["reload"]
    with environment(reload), settings(reload):
        report: dict[str, Any] = {name: stepped(name) for name in NAMES}
        report["imported"] = [name for name in ("torch._inductor", "torch._dynamo") if name in sys.modules]
        if reload:
            report["loads"] = [HostCuda().load_table(adamw()) is not None]
            for path in Path(disk_cache.directory() / disk_cache.FOLDER).glob("triton_*.py"):
                path.write_text(path.read_text() + "# damaged\n")
            report["loads"].append(HostCuda().load_table(adamw()) is not None)
    json.dump(report, sys.stdout)


def adamw() -> Signature:
    """Return the signature of the unit of AdamW."""
    ((signature, _),) = (
        call for batch in steps.batches(steps.optimizer("AdamW"), HostCuda(), "cpu") for call in batch.calls
    )
    return signature


if __name__ == "__main__":
    main()
