"""Script: compile the CUDA units of all optimizers to machine code, count their launches, and print both as JSON.

It needs ``TORCHINDUCTOR_COMPILE_THREADS=1``. Tensors are in host memory, and launches are recorded but not made.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import compiled_optim as co
from compiled_optim.backends import BoundArguments, ScalarRows, triton_compiler
from compiled_optim.backends.cpu import CpuBackend
from compiled_optim.backends.table_passes import UPDATE, measure_name
from compiled_optim.backends.triton_driver import add_up, clip
from perf.workloads import WORKLOADS
from tests.hardware_free import steps
from tests.hardware_free.gpuless_cuda import gpuless_cuda
from tests.hardware_free.host_cuda import HostCuda

NUMBERS = (20, 161, 1000)
COUNTED: dict[str, tuple[str, dict[str, Any]]] = {
    **steps.VARIANTS,
    "SGD clipped": ("SGD", dict(max_grad_norm=1.0)),
    "BertAdam, one group": ("BertAdam", dict(one_group=True)),
    "Lamb clipped": ("Lamb", dict(max_grad_norm=1.0)),
    "AdamP clipped": ("AdamP", dict(max_grad_norm=1.0)),
}
TARGETS = (80, 90)
MODELS = ("resnet50", "gpt2_small", "thousand_tensors")


class Launches:
    """Records launches. With ``compiles``, Triton compiles each kernel as for a real launch (sm_80)."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.kernels: dict[str, Any] = {}
        self.compiles = False

    def __enter__(self) -> Launches:
        from triton.runtime.jit import JITFunction

        run = JITFunction.run

        def record(kernel, *args, grid, warmup, **options):
            self.names.append(kernel.fn.__name__)
            self.kernels[kernel.cache_key] = kernel
            if self.compiles:
                run(kernel, *args, grid=grid, warmup=True, **options)

        self._patch = mock.patch.object(JITFunction, "run", record)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


class Operations(TorchDispatchMode):
    """Records operations of torch other than views and allocations: on a GPU, each copies memory or is a launch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if not function.is_view and not name.startswith("aten.empty"):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def shapes(number: int) -> list[tuple[int, ...]]:
    return [steps.TWENTY[i % len(steps.TWENTY)] for i in range(number)]


def launches_of_a_step(name: str, number: int, launches: Launches, **options: Any) -> dict[str, Any]:
    """Return the launches and the copies of the second step over a number of tensors, in two groups unless told so."""
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes(number)]
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.5}]
    if options.pop("one_group", False):
        groups = [{"params": params}]
    backend = options.pop("backend")
    optimizer = getattr(co, name)(groups, **{**steps.OPTIMIZERS[name], **options}, backend=backend)
    for param in params:
        param.grad = torch.ones_like(param)
    with Operations() as operations:
        optimizer.step()
        launches.names.clear()
        operations.names.clear()
        optimizer.step()
    counts = Counter(operations.names)
    copies = counts.pop("aten.copy_.default", 0)
    return {"launches": len(launches.names) + counts.total(), "copies": copies, "operations": sorted(counts)}


def registers(kernel: Any, signature: dict[str, str], target: int, warps: int, **constants: int) -> dict[str, Any]:
    """Compile a kernel with Triton and ptxas; return its registers, spilled bytes and widest load and store."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    given = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    types = {name: "constexpr" if name in constants else signature[name] for name in kernel.arg_names}
    options = {"num_warps": warps, "num_stages": 1}
    made = triton.compile(ASTSource(kernel, types, given, {}), target=GPUTarget("cuda", target, 32), options=options)
    text = made.asm["ptx"]
    arch = re.search(r"\.target (\w+)", text)[1]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(text)
        file.flush()
        command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={arch}", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    accesses = re.findall(r"(ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)\s", text)
    widest = dict.fromkeys(("ld", "st"), 0)
    for kind, count, bits in accesses:
        widest[kind] = max(widest[kind], int(count or 1) * int(bits) // 8)
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", report))),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
        "load": widest["ld"],
        "store": widest["st"],
        "target": arch,
        "machine_code": made.asm["cubin"][:4] == b"\x7fELF",
    }


POINTERS = {torch.float32: "*fp32", torch.float64: "*fp64"}


def drivers(
    name: str, dtype: torch.dtype, sharded: bool = False, unscales: bool = False, **options: Any
) -> dict[str, Any]:
    """Compile the drivers of an optimizer for each target. With ``unscales`` they take ``found_inf``."""
    found: dict[str, Any] = {}
    optimizer = steps.optimizer(name, dtype=dtype, **options)
    for batch in steps.batches(optimizer, HostCuda() if unscales else CpuBackend(), "cuda:0", sharded, unscales):
        for signature, _ in batch.calls:
            if signature.rank > 2:  # whole matrices are stepped one by one, by Inductor's own kernels
                continue
            module = triton_compiler.load_module(triton_compiler.write_module(signature))
            number = POINTERS[signature.program.dtype]
            for own in [*map(measure_name, range(len(module.STAGES))), *([UPDATE] if module.UPDATES else [])]:
                driver = getattr(module, own)
                types = dict.fromkeys(driver.arg_names, number)
                table = ("tasks", "grads", "row_of", "fixed", "columns", "first_rows")
                types |= dict.fromkeys(table, "*i64")
                label = f"{signature} {own}"
                found[label] = [registers(driver, types, target, module.WARPS) for target in TARGETS]
    return found


def shared_kernels() -> dict[str, Any]:
    """Compile the kernels that all units share."""
    adding = dict.fromkeys(("grads", "slots"), "*i64") | dict.fromkeys(("partials", "totals"), "*fp32")
    clipping = dict.fromkeys(clip.arg_names, "fp32") | dict.fromkeys(("count", "rows"), "i32")
    clipping |= dict.fromkeys(("squares", "inv_scale", "grad_scale", "norm"), "*fp32")
    found: dict[str, Any] = {"add_up": [], "clip": []}
    for target in TARGETS:
        found["add_up"].append(registers(add_up, adding, target, 4, FIRST=0, COUNT=2, SUMS=2, KNOWN=0, BLOCK=1024))
        found["clip"].append(registers(clip, clipping, target, 4, UNSCALES=True, CLIPS=2, BLOCK=1024))
    return found


class Address(SimpleNamespace):
    """A tensor of which only the address is used."""

    def data_ptr(self) -> int:
        return 1 << 40


def one_compilation(launches: Launches) -> dict[str, Any]:
    """Bind and launch AdamW over three models; count what Inductor and Triton compile for them together."""
    compiled: list[str] = []

    class Counting(HostCuda):
        def compile_table(self, signature):
            compiled.append(str(signature))
            return super().compile_table(signature)

    backend = Counting()
    optimizer = steps.optimizer("AdamW")
    (bucket,) = steps.buckets(optimizer, backend)
    launches.kernels.clear()
    launches.names.clear()
    launches.compiles = True
    tensors = []
    for model in MODELS:
        batch = bucket.update
        batch.__dict__.pop("calls", None)
        batch.shapes = [(torch.Size(shape).numel(),) for shape in WORKLOADS[model].shapes]
        tensors.append(len(batch.shapes))
        lists = [[Address()] * len(batch.shapes) for _ in batch.dtypes[1:]]
        scalars = ScalarRows(len(bucket.program.scalars), len(batch.shapes), torch.float32)
        batch.bind(lists, BoundArguments(scalars))([Address()] * len(batch.shapes))
    launches.compiles = False
    versions = sum(len(cache[0]) for kernel in launches.kernels.values() for cache in kernel.device_caches.values())
    return {
        "tensors": tensors,
        "units": len(compiled),
        "machine code": versions,
        "launches": launches.names[:],
    }


def main() -> None:
    report: dict[str, Any] = {"launches": {}, "drivers": {}}
    unverified = mock.patch.object(triton_compiler, "table_agrees", return_value=True)
    with gpuless_cuda(), Launches() as launches, unverified:
        report["one compilation"] = one_compilation(launches)
        backend = HostCuda()
        cases: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in steps.OPTIMIZERS}
        for case, (name, options) in {**cases, **COUNTED}.items():
            if getattr(co, name).matrices:
                continue
            found = [launches_of_a_step(name, number, launches, backend=backend, **options) for number in NUMBERS]
            report["launches"][case] = found
        for case, (name, options) in {**cases, **steps.VARIANTS, **steps.SHARDED}.items():
            report["drivers"] |= drivers(name, torch.float32, case in steps.SHARDED, **options)
        for name in ("AdamW", "Lamb", "AdamP"):
            report["drivers"] |= drivers(name, torch.bfloat16)
        for dtype, options in steps.STORED.values():
            report["drivers"] |= drivers("AdamW", dtype, **options)
        for name in ("AdamW", "Lamb"):
            report["drivers"] |= drivers(name, torch.float32, unscales=True)
        report["drivers"] |= shared_kernels()
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
