"""Script: lower all optimizers to CUDA kernels, count their launches, and print the results as JSON.

It needs ``TORCHINDUCTOR_COMPILE_THREADS=1``.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import compiled_optim as co
from compiled_optim.backends import Signature
from compiled_optim.backends.cuda import CudaBackend
from compiled_optim.engine.clipping import GradScaling
from compiled_optim.engine.plan import clips_any
from tests.hardware_free import steps
from tests.hardware_free.gpuless_cuda import Recording, gpuless_cuda


def launch(backend: CudaBackend, signature: Signature) -> None:
    """Compile a unit and call it with fake tensors, so that its launches are recorded."""
    graph = backend.graph(signature)
    # scalars are passed to a launch by value, and fake tensors have no values
    arguments = {"scalars": [SimpleNamespace(item=lambda: 1.0)] * 100}
    with FakeTensorMode():
        lists = [
            [torch.empty(shape, dtype=dtype, device="cuda") for shape in signature.lane.shapes]
            for dtype in signature.dtypes
        ]
        for name, dtype, shape in signature.arguments:
            arguments.setdefault(name, torch.empty(shape, dtype=dtype, device="cuda"))
        graph.run(graph.order_inputs((), lists, arguments))


class EagerOperations(TorchDispatchMode):
    """Record operations that write to a CUDA tensor (one launch each) and operations that make the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []
        self.syncs: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        devices = {arg.device.type for arg in args if isinstance(arg, torch.Tensor) and arg.ndim == 0}
        if function is torch.ops.aten._local_scalar_dense.default or (
            "cuda" in devices and isinstance(result, torch.Tensor) and result.device.type == "cpu"
        ):
            self.syncs.append(str(function))
        elif isinstance(result, torch.Tensor) and result.device.type == "cuda" and not function.is_view:
            self.launches.append(str(function))
        return result


def clipping(optimizer: co.Optimizer) -> EagerOperations:
    """Return the eager operations of clipping, which run between the measuring unit and the updating unit."""
    with FakeTensorMode():
        scale, square = torch.empty((1,), device="cuda"), torch.empty((1,), device="cuda")
        bucket = SimpleNamespace(groups=optimizer.param_groups, group_numbers=[0], dtypes=(torch.float32,), shards=None)
        phase = GradScaling(optimizer, [], clips=True)
        phase.norms = [lambda grads: square]
        with EagerOperations() as operations:
            phase.run([SimpleNamespace(bucket=bucket, groups=[0], grad_scale=scale)], [[]], None)
    return operations


def lowered(recording: Recording) -> dict[str, Any]:
    backend = CudaBackend()
    found: dict[str, Any] = {}
    cases: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in steps.OPTIMIZERS}
    for case, (name, options) in {**cases, **steps.CLIPPED, **steps.SHARDED}.items():
        optimizer = steps.optimizer(name, **options)
        recording.launches.clear()
        recording.kernels.clear()
        for batch in steps.batches(optimizer, backend, "cuda:0", sharded=case in steps.SHARDED):
            for signature, _ in batch.calls:
                launch(backend, signature)
        clips = clips_any(optimizer, optimizer.param_groups)
        eager = clipping(optimizer) if clips else EagerOperations()
        codes = [code for codes in recording.machine_code().values() for code in codes]
        found[case] = dict(
            launches=len(recording.launches) + len(eager.launches),
            syncs=eager.syncs,
            kernels=len(set(recording.launches)),
            machine_code=bool(codes) and all(code[:4] == b"\x7fELF" for code in codes),
            arguments=max(len(kernel.triton_meta["signature"]) for kernel in recording.kernels.values()),
            target=recording.targets(),
        )
    return found


def main() -> None:
    with gpuless_cuda() as recording:
        json.dump(lowered(recording), sys.stdout)


if __name__ == "__main__":
    main()
