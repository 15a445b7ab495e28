"""Script: run the CUDA backend's kernels in Triton's interpreter, on CPU memory, and compare them with eager steps.

It prints as JSON, for each optimizer, the largest difference between the two and how far the parameters moved.
"""

from __future__ import annotations

import json
import sys

import torch

from compiled_optim.backends import BoundArguments, ScalarRows
from compiled_optim.backends.cuda import CudaBackend
from compiled_optim.backends.whole_lists import ListUnit
from tests.hardware_free import steps, triton_math
from tests.hardware_free.gpuless_cuda import gpuless_cuda
from tests.helpers import params_of

SHAPES = [(24, 40), (130, 33), (7, 5, 3), (1, 1), (40,), (33,), (1,), (3000,)]
STEPS = 3


def distances(name: str, backend: CudaBackend, spoil: float = 1.0) -> dict[str, float]:
    """Compare some interpreted steps with eager ones.

    ``spoil`` multiplies the learning rate that the kernels get. A value other than 1 is a deliberate error.
    """
    ours, eager = steps.optimizer(name, SHAPES), steps.optimizer(name, SHAPES)
    start = [param.detach().clone() for param in params_of(ours)]
    generator = torch.Generator().manual_seed(1)
    batches = []
    for step in range(1, STEPS + 1):
        for mine, theirs in zip(params_of(ours), params_of(eager), strict=True):
            mine.grad = theirs.grad = torch.randn(mine.shape, generator=generator)
        eager.step()
        if not batches:
            batches = [_bound(bucket, backend) for bucket in steps.buckets(ours, backend)]
        for bucket, calls, scalars in batches:
            values = ours.row(bucket.groups[0], step).scalars
            scalars.fill([[value * (spoil if key in ("lr", "step_size") else 1) for key, value in values.items()]])
            for indices, call in calls:
                call([bucket.entries[i].param.grad.view(bucket.shapes[i]) for i in indices])
    pairs = list(zip(params_of(ours), params_of(eager), strict=True))
    return {
        "apart": max(float((mine - theirs).abs().max()) for mine, theirs in pairs),
        "moved": min(float((mine - old).abs().max()) for mine, old in zip(params_of(ours), start, strict=True)),
    }


def _bound(bucket, backend):
    """Return the calls of an update, with units compiled for a GPU and tensors in CPU memory."""
    scalars = ScalarRows(len(bucket.program.scalars), 1, torch.float32)
    shapes = bucket.shapes
    params = [entry.param.detach().view(shape) for entry, shape in zip(bucket.entries, shapes, strict=True)]
    states = [[torch.zeros_like(param) for param in params] for _ in bucket.program.states]
    calls = []
    bucket.update.device = "cuda:0"
    for signature, indices in bucket.update.calls:
        unit = ListUnit(backend.graph(signature))
        lists = [[tensors[i] for i in indices] for tensors in (params, *states)]
        calls.append((indices, unit.bind([shapes[i] for i in indices], lists, BoundArguments(scalars))))
    return bucket, calls, scalars


def main() -> None:
    triton_math.install()
    with gpuless_cuda() as recording:
        backend = CudaBackend()
        report = {name: distances(name, backend) for name in ("AdamW", "SGD", "Lamb", "AdamP")}
        report["launches"] = len(recording.launches)
        report["spoiled"] = distances("AdamW", backend, spoil=1.01)
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
