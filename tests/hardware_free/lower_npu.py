"""Script: lower lists of tensors with torchair's converters, step them on device ``npu``, and print results as JSON.

The tensors are in CPU memory, and an interpreter runs the GE graphs. ``lower_npu_flat`` does the same for flat buffers,
which are the default.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import torch

import compiled_optim as co
from compiled_optim import backends
from compiled_optim.backends import npu
from compiled_optim.engine import sorting
from tests import npu_device
from tests.hardware_free import steps, torchair_without_cann
from tests.hardware_free.torchair_without_cann import Recording
from tests.helpers import params_of

SHAPES = [(6, 4), (5, 3, 2), (1, 1), (7,), (1,)]
STEPS = 10


def stepped(name: str, device: str, compiled: bool, dtype: torch.dtype, **options: Any) -> co.Optimizer:
    """Return an optimizer after some steps, each with another learning rate."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    params = [torch.nn.Parameter(value.to(device)) for value in values]
    optimizer = getattr(co, name)(params, **{**steps.OPTIMIZERS[name], **options}, compile=compiled)
    for step in range(STEPS):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(dtype).to(device)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        optimizer.step()
    return optimizer


def executed(recording: Recording) -> dict[str, Any]:
    """Return, for each optimizer and dtype, the operations of its graphs and the difference from eager steps."""
    found = {}
    cases = {**{name: (name, {}) for name in steps.OPTIMIZERS}, **steps.VARIANTS, **steps.SHARDED}
    for case, (name, options) in cases.items():
        for dtype in (torch.float32, torch.bfloat16):
            recording.clear()
            backends.get("npu")._units.clear()  # so that each case compiles its own graphs
            shards = steps.OneProcess() if case in steps.SHARDED else None
            with (
                mock.patch.object(sorting, "has_dtensor", return_value=shards is not None),
                mock.patch.object(sorting.ShardSpec, "from_tensor", return_value=shards),
            ):
                ours = stepped(name, "npu", True, dtype, **options, layout="tensors")
            eager = stepped(name, "cpu", False, dtype, **options)
            pairs = list(zip(params_of(ours), params_of(eager), strict=True))
            report = ours.explain()
            found[f"{case} {str(dtype).removeprefix('torch.')}"] = dict(
                operations=recording.operations(),
                copied_back=recording.copied_back,
                apart=max(float((a.detach().cpu() - b.detach()).abs().max()) for a, b in pairs),
                backends=report.backends,
                recompiles=report.recompiles,
                built_again=len(recording.graphs) - report.graphs,
                # each graph also runs once to be verified
                runs_of_steps=recording.runs - report.graphs,
                calls_of_steps=report.calls_per_step * STEPS,
            )
    return found


def clipped_together(*devices: str) -> list[Any]:
    """Step two parameters on these devices, with their gradients clipped by the norm of both."""
    params = [torch.nn.Parameter(torch.ones(4, device=device)) for device in devices]
    optimizer = co.SGD(params, lr=1.0, max_grad_norm=1.0, compile=devices != ("cpu", "cpu"))
    for param, value in zip(params, (3.0, 4.0), strict=True):
        param.grad = torch.full_like(param, value)
    optimizer.step()
    return [[param.tolist() for param in params], float(optimizer.last_grad_norm)]


def mixed() -> dict[str, Any]:
    """Step parameters on both devices with one optimizer, then move the one on the NPU to the CPU and step again."""
    moves, stays = (torch.nn.Parameter(torch.ones(4, device=device)) for device in ("npu", "cpu"))
    optimizer = co.SGD([moves, stays], lr=0.5, momentum=0.9)

    def step() -> list[Any]:
        for param in (moves, stays):
            param.grad = torch.ones_like(param)
        optimizer.step()
        batches = optimizer.explain().batches
        return [[moves.tolist(), stays.tolist()], sorted(batch.backend for batch in batches)]

    before = step()
    # as module.cpu() does with torch.__future__.set_swap_module_params_on_conversion
    torch.utils.swap_tensors(moves, torch.nn.Parameter(moves.detach().cpu()))
    after = step()
    state = optimizer.state[moves]["momentum_buffer"]
    return dict(before=before, after=after, events=optimizer.explain().events, state=str(state.device))


def main() -> None:
    npu_device.install()
    recording = torchair_without_cann.install()
    recording.watch(npu.NpuBackend)
    report: dict[str, Any] = {}
    with torchair_without_cann.interpreted():
        report["chosen"] = {device: backends.for_device(device).name for device in ("npu", "cpu")}
        report["executed"] = executed(recording)
        report["mixed"] = mixed()
        report["clipped"] = clipped_together("npu", "cpu"), clipped_together("cpu", "cpu")
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
