"""Script: step optimizers with the CUDA backend's kernels in Triton's interpreter, and compare them with references.

It prints as JSON the largest differences from torch.optim or from the formulas of the catalog, in float64, how far the
parameters moved, and whether memory around the tensors was written to.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import compiled_optim as co
from catalog import CATALOG
from compiled_optim.backends import ScalarRows, table_passes, tensor_by_tensor
from compiled_optim.backends.recording import CannotRecord
from compiled_optim.backends.triton_table import CHUNK, BoundTritonTable
from tests.engine.formulas import FormulaOfEach
from tests.hardware_free import steps, triton_math
from tests.hardware_free.gpuless_cuda import gpuless_cuda
from tests.hardware_free.host_cuda import HostCuda

BLOCK = 1024
LENGTHS = (0, 1, 15, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 37)
ROWS = ((5, 7), (40, 33), (12, 64), (3, 300), (64, 9), (70, 128), (1, 1))
"""Shapes with two dimensions: narrow and wide, with and without rows that start at multiples of 16 bytes."""

SHAPES = [*((length,) for length in LENGTHS), *ROWS]
STEPS = 3
GUARD = 64
"""Elements before and after each tensor that nothing may write to."""

SENTINEL = 77.0
NORMS = {"BertAdam": {"max_grad_norm": 1.0}, "Prodigy": {"d_coef": 0.0}}
"""Defaults that the reference has to be given, and what makes parameters independent of each other."""

IN_BFLOAT16 = {
    "Adafactor": {"eps": (1e-8, 1e-3)},  # the default depends on the dtype
    "BertAdam": {"warmup": -1},  # with a warm-up, the first step has a learning rate of 0
    # the first values of a state are numbers that bfloat16 has
    "Adagrad": {"initial_accumulator_value": 0.125},
    "Rprop": {"lr": 2.0**-7},
}


class Guarded:
    """Tensors in the middle of larger memory. Every third one starts at an odd address, one element late."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._wholes: list[tuple[Tensor, Tensor]] = []
        self.tensors = []
        for number, shape in enumerate(shapes):
            values = torch.rand(shape, generator=generator) * 2 - 1
            self.tensors.append(self.place(values.to(dtype), number % 3 == 2))

    def place(self, values: Tensor, misaligned: bool) -> Tensor:
        """Return a copy of a tensor in guarded memory."""
        start = GUARD + misaligned
        whole = torch.full((start + values.numel() + GUARD,), SENTINEL, dtype=values.dtype)
        own = whole[start : start + values.numel()].view(values.shape)
        own.copy_(values)
        self._wholes.append((whole, own))
        return own

    def intact(self) -> bool:
        """Whether all memory around the tensors is as it was."""
        return all(
            bool((whole[: own.storage_offset()] == SENTINEL).all())
            and bool((whole[own.storage_offset() + own.numel() :] == SENTINEL).all())
            for whole, own in self._wholes
        )


def groups(params: list[Any], lr: float) -> list[dict[str, Any]]:
    """Return two groups with different learning rates, so that a batch has several rows."""
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 3 * lr}]


def compared(name: str, shapes=SHAPES, **options: Any) -> dict[str, Any]:
    """Compare some steps with those of the reference. A few gradients are absent in some steps."""
    entry = CATALOG[name]
    options = {"lr": 0.01, **entry.typical, **options}
    if not entry.steps_empty:  # nor matrices, which are stepped one by one
        shapes = [shape for shape in shapes if 0 not in shape and len(shape) < 2]
    # the formula is that of each parameter alone, with its own number of steps
    counts_by_group = getattr(co, name).after_step is not co.Optimizer.after_step
    memory = Guarded(shapes, torch.float32, seed=0)
    ours = [torch.nn.Parameter(tensor) for tensor in memory.tensors]
    theirs = [torch.nn.Parameter(param.detach().double()) for param in ours]
    start = [param.detach().clone() for param in ours]
    optimizer = getattr(co, name)(groups(ours, options["lr"]), **options, backend=HostCuda())
    clip = None if entry.sums == "all gradients" else options.pop("max_grad_norm", None)
    if options.get("cautious"):  # tests/optimizer/test_cautious.py compares this with formulas
        reference = getattr(co, name)(groups(theirs, options["lr"]), **options, compile=False)
    elif entry.in_torch:
        reference = entry.reference(groups(theirs, options["lr"]), **options)
    else:
        reference = FormulaOfEach(groups(theirs, options["lr"]), entry, **options)
    generator = torch.Generator().manual_seed(1)
    grads = Guarded([], torch.float32, seed=0)
    for step in range(STEPS):
        for i, (param, twin) in enumerate(zip(ours, theirs, strict=True)):
            values = torch.randn(param.shape, generator=generator)
            absent = (i + step) % 5 == 4 and not counts_by_group
            param.grad = None if absent else grads.place(values, (i + step) % 4 == 3)
            twin.grad = None if absent else values.double()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(theirs, clip)
        optimizer.step()
        reference.step()
        if step == 0:  # states in guarded memory too
            for i, param in enumerate(ours):
                for key, state in optimizer.state[param].items():
                    if state.shape == param.shape:  # numbers are not the kernels' memory
                        optimizer.state[param][key] = memory.place(state, i % 3 == 1)
    report = optimizer.explain()
    pairs = [(param, twin) for param, twin in zip(ours, theirs, strict=True) if param.numel()]
    moved = [(param - old).abs().max() for param, old in zip(ours, start, strict=True) if param.numel()]
    return {
        "apart": largest([(param - twin).abs().max() for param, twin in pairs]),
        "moved": float(min(moved)),
        "intact": memory.intact() and grads.intact(),
        "limits": [unit.limit for unit in report.units if unit.limit],
        "calls": report.calls_per_step,
    }


def unscaled() -> dict[str, Any]:
    """Compare steps of a GradScaler that the optimizer itself unscales and clips with those of torch."""
    ours = [torch.nn.Parameter(tensor) for tensor in Guarded([(17,), (BLOCK + 1,)], torch.float32, 0).tensors]
    theirs = [torch.nn.Parameter(param.detach().double()) for param in ours]
    optimizer = co.AdamW(ours, lr=0.01, max_grad_norm=1.0, fused=True, backend=HostCuda())
    reference = torch.optim.AdamW(theirs, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    generator = torch.Generator().manual_seed(1)
    grads = []
    for _ in range(STEPS):
        for param, twin in zip(ours, theirs, strict=True):
            twin.grad = torch.randn(param.shape, generator=generator).double()
            param.grad = 8.0 * twin.grad.float()
        expected = [twin.grad.clone() for twin in theirs]
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        reference.step()
        scaler.step(optimizer)
        scaler.update(8.0)
        grads += [(param.grad - grad).abs().max() for param, grad in zip(ours, expected, strict=True)]
    return {
        "apart": largest([(param - twin).abs().max() for param, twin in zip(ours, theirs, strict=True)]),
        "gradients apart": largest(grads),
        "limits": [unit.limit for unit in optimizer.explain().units if unit.limit],
    }


def stored(dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Any]:
    """Compare steps of AdamW in another storage with those of its eager form, and with torch.optim in float64.

    Random bits are computed from the values of a step, so both forms round alike.
    """
    shapes = [(17,), (BLOCK + 1,), (70, 128)]
    starts = [tensor.to(torch.bfloat16) for tensor in Guarded(shapes, torch.float32, 0).tensors]
    ours, eager = ([torch.nn.Parameter(start.to(dtype, copy=True)) for start in starts] for _ in range(2))
    exact = [torch.nn.Parameter(start.double()) for start in starts]
    optimizers = [
        co.AdamW(ours, lr=0.01, **options, backend=HostCuda()),
        co.AdamW(eager, lr=0.01, **options, compile=False),
        torch.optim.AdamW(exact, lr=0.01),
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for twins in zip(ours, eager, exact, strict=True):
            grad = torch.randn(twins[0].shape, generator=generator).bfloat16()
            for twin in twins:
                twin.grad = grad.to(twin.dtype)
        for optimizer in optimizers:
            optimizer.step()
    return {
        "apart from eager": largest([(a - b).abs().max() for a, b in zip(ours, eager, strict=True)]),
        "apart": largest([(a - b).square().mean().sqrt() for a, b in zip(ours, exact, strict=True)]),
        "limits": [unit.limit for unit in optimizers[0].explain().units if unit.limit],
        "units": [unit.name for unit in optimizers[0].explain().units],
    }


def largest(differences: list[Tensor]) -> float:
    """Return the largest difference. Unlike max(), it is NaN if one of them is."""
    return float(torch.stack([difference.detach().double() for difference in differences]).max())


def bfloat16(name: str) -> float:
    """Return the largest error of bfloat16 steps, in units of the last place; 0.5 is one rounding.

    Before each step the reference gets the parameters and states of the step before, so no error is carried over.
    """
    entry = CATALOG[name]
    options = {"lr": 0.01, **entry.typical, **IN_BFLOAT16.get(name, {})}
    ours = [torch.nn.Parameter(tensor) for tensor in Guarded([(17,), (2 * BLOCK + 5,)], torch.bfloat16, 0).tensors]
    optimizer = getattr(co, name)(ours, **options, backend=HostCuda())
    generator = torch.Generator().manual_seed(1)
    errors: list[Tensor] = []
    reference: torch.optim.Optimizer | None = None
    for _ in range(STEPS if entry.in_torch else 1):
        before = [param.detach().double() for param in ours]
        theirs = [torch.nn.Parameter(old.clone()) for old in before]
        previous, reference = reference, entry.reference(theirs, **options)
        if previous is not None:
            for param, twin in zip(ours, theirs, strict=True):
                reference.state[twin] = {k: v.double() for k, v in optimizer.state[param].items()}
        for param, twin in zip(ours, theirs, strict=True):
            param.grad = torch.randn(param.shape, generator=generator).bfloat16()
            twin.grad = param.grad.double()
        optimizer.step()
        reference.step()
        for param, twin, old in zip(ours, theirs, before, strict=True):
            # of the larger one of old and new: float32 is not exact where a parameter almost vanishes
            place = torch.exp2(torch.floor(torch.log2(torch.maximum(twin.abs(), old.abs()).clamp(min=1e-20))) - 7)
            errors.append(((param.double() - twin).abs() / place).max())
    return largest(errors)


@contextmanager
def wrong_constant() -> Iterator[None]:
    """Multiply the last hyperparameter of the second row by 1.01."""
    fill = ScalarRows.fill

    def spoiled(self, values):
        fill(self, [[*own[:-1], own[-1] * (1.01 if row else 1)] for row, own in enumerate(values)])

    with mock.patch.object(ScalarRows, "fill", spoiled):
        yield


@contextmanager
def shifted_pointer() -> Iterator[None]:
    """Let the tables have addresses of parameters that are 4 bytes too large."""
    send = BoundTritonTable._send

    def shifted(self, numbers):
        return send(self, (number + 4 if number > 1 << 32 else number for number in numbers))

    with mock.patch.object(BoundTritonTable, "_send", shifted):
        yield


@contextmanager
def exchanged_inputs() -> Iterator[None]:
    """Let kernels get the gradient for the parameter, and the parameter for the gradient."""
    trace = table_passes.trace

    def exchanged(*args, **kwargs):
        graph = trace(*args, **kwargs)
        first, second = (graph.inputs.index((source, 0)) for source in (0, 1))
        graph.inputs[first], graph.inputs[second] = graph.inputs[second], graph.inputs[first]
        return graph

    with mock.patch.object(table_passes, "trace", exchanged):
        yield


def unverified() -> Any:
    """Return a context in which wrong units are not replaced."""
    return mock.patch("compiled_optim.backends.triton_compiler.table_agrees", return_value=True)


class MeanRule(co.Optimizer):
    """A user's rule that combines the elements of a tensor, so that a tensor cannot be cut into chunks."""

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr}, **options)

    @staticmethod
    def update(p, g, *, lr):
        for param, grad in zip(p, g, strict=True):
            param.sub_(lr.tensor * (grad - grad.mean()))


def fallback() -> dict[str, Any]:
    """Step a rule that does not fit the table, tensor by tensor, with kernels compiled for a GPU."""

    class Fallback(HostCuda):
        def compile_table(self, signature):
            try:
                return super().compile_table(signature)
            except CannotRecord as error:
                self.reason = str(error)
                unit = tensor_by_tensor.compile_tensor_by_tensor(replace(signature, device="cuda:0"), 0)
                unit._device = "cpu"
                return unit

    ours = [torch.nn.Parameter(torch.ones(size)) for size in (3, 40)]
    backend = Fallback()
    optimizer = MeanRule(ours, backend=backend)
    expected = []
    for param in ours:
        param.grad = torch.arange(float(len(param)))
        expected.append(param.detach() - 0.1 * (param.grad - param.grad.mean()))
    with mock.patch.object(tensor_by_tensor, "agrees", return_value=True):
        optimizer.step()
    apart = largest([(param - one).abs().max() for param, one in zip(ours, expected, strict=True)])
    return {"apart": apart, "reason": backend.reason}


def main() -> None:
    triton_math.install()
    with gpuless_cuda():
        report: dict[str, Any] = {name: compared(name, **NORMS.get(name, {})) for name in steps.OPTIMIZERS}
        report["AdamW clipped"] = compared("AdamW", max_grad_norm=1.0)
        report["Lamb clipped"] = compared("Lamb", max_grad_norm=1.0)
        report["Lamb cautious"] = compared("Lamb", cautious=True)
        report["AdamP cautious"] = compared("AdamP", cautious=True)
        report["bfloat16"] = {name: bfloat16(name) for name in steps.OPTIMIZERS}
        report["unscaled"] = unscaled()
        report["stored"] = {label: stored(*case) for label, case in steps.STORED.items()}
        report["fallback"] = fallback()
        few = [(17,), (BLOCK + 1,), (16,)]
        with wrong_constant():
            report["wrong constant"] = compared("AdamW", few)
        with unverified(), shifted_pointer():  # without states, which would not be in guarded memory
            report["shifted pointer"] = compared("SGD", few, momentum=0.0)
        with exchanged_inputs():
            report["exchanged inputs"] = compared("SGD", few)
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
