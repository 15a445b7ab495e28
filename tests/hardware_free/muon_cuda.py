"""Script: step Muon with the CUDA backend's kernels, and print the results as JSON.

With ``TRITON_INTERPRET=1``, Triton's interpreter runs the kernels, and the steps are compared with torch.optim.Muon.
Otherwise ptxas compiles them. Tensors are in host memory, so the matrix products are those of the CPU; on a GPU the
same operations of torch call cuBLAS.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any
from unittest import mock

import torch

import compiled_optim as co
from compiled_optim.backends import triton_compiler
from compiled_optim.backends.cpu import CpuBackend
from tests.hardware_free import steps, triton_math
from tests.hardware_free.gpuless_cuda import INTERPRETED, gpuless_cuda
from tests.hardware_free.host_cuda import HostCuda
from tests.hardware_free.lower_cuda import POINTERS, TARGETS, Operations, registers

SHAPES = [(12, 8), (8, 12), (10, 10), (12, 8), (40, 33)]


def stepped(make: Any, number: int, **options: Any) -> tuple[Any, list[Any], Counter[str]]:
    """Return the optimizer, the parameters and the operations of the last of three steps over a number of matrices."""
    generator = torch.Generator().manual_seed(0)
    shapes = [SHAPES[i % len(SHAPES)] for i in range(number)]
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).double()) for shape in shapes]
    if make is co.Muon:
        params = [torch.nn.Parameter(param.detach().float()) for param in params]
    optimizer = make(params, lr=0.02, **options)
    for step in range(3):
        for i, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = None if step == 1 and i == 1 else grad
        with Operations() as operations:
            optimizer.step()
    return optimizer, params, Counter(operations.names)


def compared(number: int) -> dict[str, Any]:
    """Compare steps with those of torch.optim.Muon in float64, and list the operations of a step."""
    optimizer, ours, operations = stepped(co.Muon, number, backend=HostCuda())
    _, theirs, _ = stepped(torch.optim.Muon, number)
    report = optimizer.explain()
    return {
        "apart": max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)),
        "limits": [unit.limit for unit in report.units if unit.limit],
        "units": [unit.name for unit in report.units],
        "calls": report.calls_per_step,
        "operations": dict(sorted(operations.items())),
    }


def drivers() -> dict[str, Any]:
    """Compile both passes for each target."""
    found: dict[str, Any] = {}
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    for batch in steps.batches(co.Muon(params, compile=False), CpuBackend(), "cuda:0"):
        for signature, _ in batch.calls:
            driver = triton_compiler.load_module(triton_compiler.write_module(signature))
            types = dict.fromkeys(driver.update.arg_names, POINTERS[signature.program.dtype])
            types |= dict.fromkeys(("tasks", "grads", "row_of", "fixed", "columns", "first_rows"), "*i64")
            found[str(signature)] = [registers(driver.update, types, target, driver.WARPS) for target in TARGETS]
    return found


def main() -> None:
    with gpuless_cuda():
        if INTERPRETED:
            triton_math.install()
            report = {str(number): compared(number) for number in (5, 20)}
        else:
            with mock.patch.object(triton_compiler, "table_agrees", return_value=True):
                report = drivers()
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
