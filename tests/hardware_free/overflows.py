"""Script: step optimizers under a GradScaler with ``fused=True``, with overflows in some steps, and print the results.

The argument selects the backend: ``cuda`` runs the kernels in Triton's interpreter, ``npu`` the GE graphs in an
interpreter. Both work in host memory. Methods of tensors that wait for a device are replaced to detect host reads.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import compiled_optim as co
from catalog import CATALOG
from compiled_optim.backends import npu
from compiled_optim.backends.staging import fetch
from compiled_optim.engine import amp
from tests import npu_device
from tests.engine.formulas import FormulaOfEach
from tests.hardware_free import torchair_without_cann, triton_math
from tests.hardware_free.gpuless_cuda import gpuless_cuda
from tests.hardware_free.host_cuda import HostCuda
from tests.helpers import distance

SHAPES = [(17,), (6, 5), (1025,)]
STEPS = 7
OVERFLOWS = (0, 2, 3)
READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy")
"""Methods of tensors that make the host wait for the device."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("SGD", "AdamW", "NAdam", "Lamb", "AdamP")},
    "AdamW clipped": ("AdamW", {"max_grad_norm": 1.0}),
    "two groups": ("AdamW", {}),
    "unscaled before": ("AdamW", {}),
}


class Host:
    """Records when the host reads a value that is copied from the device, and any other read of the device."""

    def __init__(self) -> None:
        self.step = -1
        self.reads: list[tuple[int, int]] = []
        """For each value that was read, the step in which it was copied and the step in which it was read."""
        self.waits: list[str] = []
        self.is_blind = False

    def fetch(self, value: torch.Tensor) -> Any:
        copied_in, read_copy = self.step, fetch(value)

        def read() -> float:
            self.reads.append((copied_in, self.step))
            return 0.0 if self.is_blind else read_copy()

        return read

    @contextlib.contextmanager
    def watched(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Record reads of ``found_inf``, of the scale and of everything on an accelerator, in this context.

        Not in the first step, in which units are compiled and verified.
        """
        with contextlib.ExitStack() as stack:
            for name in READS if self.step else ():
                stack.enter_context(mock.patch.object(torch.Tensor, name, self._checked(name, optimizer)))
            yield

    def _checked(self, name: str, optimizer: torch.optim.Optimizer) -> Any:
        method, scaling = getattr(torch.Tensor, name), (optimizer.found_inf, optimizer.grad_scale)

        def checked(tensor: torch.Tensor, *args: Any) -> Any:
            if tensor.device.type != "cpu" or any(tensor is each for each in scaling):
                self.waits.append(name)
            return method(tensor, *args)

        return checked


class Event:
    """An event of a device in host memory, where a copy is done when the call returns."""

    stream = None

    def record(self, stream: object) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        assert self.stream is STREAM


STREAM = object()


@contextlib.contextmanager
def events_on_npu() -> Iterator[None]:
    """Give the test device events and a stream; its pinned memory is other memory."""
    device, empty = torch.get_device_module("npu"), torch.empty
    device.Event, device.current_stream = Event, lambda device: STREAM
    with mock.patch.object(torch, "empty", lambda *args, pin_memory=False, **options: empty(*args, **options)):
        yield


def trained(case: str, device: str, is_blind: bool = False, **options: Any) -> dict[str, Any]:
    """Step an optimizer and its reference with the same gradients; return the differences and the reads of the host."""
    name, own = CASES[case]
    entry, settings = CATALOG[name], {"lr": 0.01, **CATALOG[name].typical, **own}
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    ours = [torch.nn.Parameter(value.clone().to(device)) for value in values]
    theirs = [torch.nn.Parameter(value.double()) for value in values]
    optimizer = getattr(co, name)(_groups(case, ours), **settings, fused=True, **options)
    clip = settings.pop("max_grad_norm", None)
    make = entry.reference if entry.in_torch else lambda params, **given: FormulaOfEach(params, entry, **given)
    reference = make(_groups(case, theirs), **settings)
    host, scaler = Host(), torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)
    host.is_blind = is_blind
    scales, grads_apart, kept = [], [], []
    with mock.patch.object(amp, "fetch", host.fetch):
        for step in range(STEPS):
            host.step = step
            scaler.scale(torch.zeros(()).to(device))
            scale = scaler.get_scale()
            grads = [torch.randn(shape, generator=generator) for shape in SHAPES]
            if step in OVERFLOWS:
                grads[-1][5] = float("inf")
            for param, grad in zip(ours, grads, strict=True):
                param.grad = (grad * scale).to(device)
            if case == "unscaled before":
                scaler.unscale_(optimizer)
            before = [param.detach().clone() for param in ours]
            make_step = optimizer.step

            def step_watched(make_step: Any = make_step) -> None:
                with host.watched(optimizer):
                    make_step()

            with mock.patch.object(optimizer, "step", step_watched):
                scaler.step(optimizer)
            scaler.update()
            scales.append(scale)
            if step in OVERFLOWS:
                kept.append(max(distance(a, b) for a, b in zip(ours, before, strict=True)))
                left = 1.0 if case == "unscaled before" else scale
                scaled = [grad * left for grad in grads[:2]]  # the others are infinite
                grads_apart += [distance(p.grad, grad) for p, grad in zip(ours, scaled, strict=False)]
                continue
            grads_apart += [distance(param.grad, grad) for param, grad in zip(ours, grads, strict=True)]
            for twin, grad in zip(theirs, grads, strict=True):
                twin.grad = grad.double()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(theirs, clip)
            reference.step()
        counts = [optimizer.state[param].get("step") for param in ours]
    return {
        "apart": max(distance(param, twin) for param, twin in zip(ours, theirs, strict=True)),
        "kept": max(kept),
        "gradients apart": max(grads_apart),
        "counts": [None if count is None else float(count) for count in counts],
        "scales": scales,
        "reads": host.reads,
        "waits": host.waits,
        "limits": [unit.limit for unit in optimizer.explain().units if unit.limit],
    }


def _groups(case: str, params: list[Any]) -> list[Any]:
    return [{"params": params[:1], "lr": 0.1}, {"params": params[1:]}] if case == "two groups" else params


def first_overflow(device: str, **options: Any) -> bool:
    """Return True if a first step that overflows leaves no state, as on the CPU."""
    param = torch.nn.Parameter(torch.ones(3).to(device))
    optimizer = co.SGD([param], lr=0.1, momentum=0.9, fused=True, **options)
    param.grad = torch.full((3,), float("inf")).to(device)
    optimizer.grad_scale, optimizer.found_inf = (torch.ones(1).to(device) for _ in range(2))
    with mock.patch.object(amp, "fetch", Host().fetch):
        optimizer.step()
        return not optimizer.state_dict()["state"]


def on_two_devices() -> list[list[float]]:
    """Step a parameter on the device and one on the host, with an overflow in every second step; return both."""
    params = [torch.nn.Parameter(torch.zeros(3).to(device)) for device in ("npu", "cpu")]
    optimizer = co.SGD(params, lr=1.0, momentum=0.9, fused=True)
    found = []
    for found_inf in (1.0, 0.0, 1.0, 0.0):
        for param in params:
            param.grad = torch.full((3,), 2.0).to(param.device)
        optimizer.grad_scale, optimizer.found_inf = (torch.tensor(value).to("npu") for value in (2.0, found_inf))
        optimizer.step()
        found.append([round(param.tolist()[0], 6) for param in params])
    return found


def on_cuda() -> dict[str, Any]:
    triton_math.install()
    with gpuless_cuda():
        backend = HostCuda()
        return {
            **{case: trained(case, "cpu", backend=backend) for case in CASES},
            "blind": trained("AdamW", "cpu", True, backend=backend),
            "first overflow": first_overflow("cpu", backend=backend),
        }


def on_npu() -> dict[str, Any]:
    npu_device.install()
    torchair_without_cann.install().watch(npu.NpuBackend)
    with torchair_without_cann.interpreted(), events_on_npu():
        return {
            **{case: trained(case, "npu") for case in CASES},
            "AdamW, list": trained("AdamW", "npu", layout="tensors"),
            "blind": trained("AdamW", "npu", True),
            "two devices": on_two_devices(),
            "first overflow": first_overflow("npu"),
        }


if __name__ == "__main__":
    json.dump({"cuda": on_cuda, "npu": on_npu}[sys.argv[1]](), sys.stdout)
