"""Script: step Muon on device ``npu``, with torchair's converters and an interpreter; print the results as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import compiled_optim as co
from compiled_optim.backends import npu
from tests import npu_device
from tests.hardware_free import torchair_without_cann

SHAPES = [(12, 8), (8, 12), (10, 10), (12, 8), (10, 10)]
STEPS = 4


def stepped(make: Any, device: str, number: int, **options: Any) -> Any:
    """Return the optimizer and its parameters after some steps over a number of matrices."""
    generator = torch.Generator().manual_seed(0)
    shapes = [SHAPES[i % len(SHAPES)] for i in range(number)]
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]
    optimizer = make(params, lr=0.02, **options)
    for step in range(STEPS):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(device)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        optimizer.step()
    return optimizer, params


def main() -> None:
    npu_device.install()
    recording = torchair_without_cann.install()
    recording.watch(npu.NpuBackend)
    report: dict[str, Any] = {}
    with torchair_without_cann.interpreted():
        for number, dtype in ((5, torch.bfloat16), (10, torch.bfloat16), (5, torch.float32)):
            recording.clear()
            optimizer, ours = stepped(co.Muon, "npu", number, ns_dtype=dtype)
            _, theirs = stepped(co.Muon, "cpu", number, ns_dtype=dtype, compile=False)
            maps = [graph for graph in recording.graphs if any(op.type == "BatchMatMul" for op in graph.graph.op)]
            report[f"{number} {dtype}"] = {
                "apart": max(
                    float((a.detach().cpu() - b.detach()).abs().max()) for a, b in zip(ours, theirs, strict=True)
                ),
                "graphs": len(recording.graphs),
                "maps": [sorted({op.type for op in graph.graph.op}) for graph in maps],
                "products": [sum(op.type == "BatchMatMul" for op in graph.graph.op) for graph in maps],
                "backends": optimizer.explain().backends,
                "recompiles": optimizer.explain().recompiles,
            }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
