"""The Ascend NPU backends: flat buffers or whole lists, compiled by torchair, or lists by Inductor with triton-ascend.

torchair converts a traced graph to a GE graph, with one converter for each operation, and decomposes almost nothing.
This module decomposes the ``torch._foreach_*`` operations that have no converter. GE outputs alias the inputs that are
updated in place, so no result is copied back.

The hyperparameters of a step are one tensor on the device. One asynchronous copy fills it before the calls of a batch.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Hashable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from compiled_optim.backends import ge_operations
from compiled_optim.backends.base import (
    Availability,
    Batch,
    BoundArguments,
    BoundBatch,
    MatrixFunction,
    ScalarRows,
    Signature,
)
from compiled_optim.backends.decompositions import (
    missing_foreach_decompositions,
    skip_clone,
    skip_whole_copy,
    skip_whole_view,
)
from compiled_optim.backends.graph import ArgumentValues
from compiled_optim.backends.inductor import Lowered, lower
from compiled_optim.backends.staging import Staging, bytes_of
from compiled_optim.backends.tracing import TracedGraph, trace
from compiled_optim.backends.whole_lists import REMEDY, WholeListBackend
from compiled_optim.errors import first_line
from compiled_optim.modes import outside_of_modes
from compiled_optim.program import TensorLists
from compiled_optim.torch_private import OpOverload


class AscendBackend(WholeListBackend):
    """What both backends share: they need torch_npu, a device and a compiler."""

    devices = ("npu",)
    skips_on_device = True
    limit = 40
    """Conversion takes 0.2 s per tensor; the compile time of CANN was not measured."""

    compiler: str
    compiler_remedy: str

    def available(self) -> Availability:
        """Import torch_npu and the compiler and look for a device; report what is missing.

        A name in torch's lists of devices or compilers does not show that either of them works.
        """
        what = _missing_device() or _missing(self.compiler, self.compiler_remedy)
        return Availability(False, f"{what}, or {REMEDY}") if what else Availability(True)


class NpuBackend(AscendBackend):
    """torchair's GE graphs, one unit for each length of a flat buffer or each list of shapes."""

    name = "npu"
    layouts = ("flat", "tensors")
    refused_storages = ("8bit", "stochastic")  # torchair has no converters for shifts and for views of other dtypes
    compiler = "torchair"
    compiler_remedy = "it comes with torch_npu and needs the packages protobuf and packaging"

    def __init__(self) -> None:
        super().__init__()
        self._maps: dict[Hashable, MatrixFunction] = {}

    def bind(self, batch: Batch, lists: TensorLists, arguments: BoundArguments) -> BoundBatch:
        """Bind the batch. Its hyperparameters are sent to the device before its calls."""
        if arguments.scalars is None:
            return super().bind(batch, lists, arguments)
        scalars = DeviceScalars(arguments.scalars, torch.device(batch.device))
        bound = super().bind(batch, lists, arguments._replace(scalars=scalars))
        return SendingBatch(bound, scalars)

    def trace(self, signature: Signature) -> TracedGraph:
        """Trace with all hyperparameters in one tensor on the device. On one tensor, list operations are not used."""
        is_flat = signature.lane.kind == "flat"
        traced = trace(signature, signature.lane.shapes, scalars_on=signature.device, decompose_foreach=is_flat)
        if is_flat:
            ge_operations.rewrite(traced.module)
        return traced

    def graph_arguments(self, signature: Signature, arguments: ArgumentValues) -> ArgumentValues:
        """Return the arguments with the hyperparameters on the device."""
        scalars = arguments.get("scalars")
        return {**arguments, "scalars": scalars.to(signature.device)} if isinstance(scalars, Tensor) else arguments

    def lower_map(self, function: MatrixFunction, stack: Tensor) -> MatrixFunction:
        """Return a GE graph for stacks of this shape: one launch instead of one for each matrix product."""
        key = function, stack.shape, stack.dtype, stack.device
        if key not in self._maps:
            with outside_of_modes(), torch.inference_mode(False), torch.no_grad():
                self._maps[key] = self._compiled_map(function, stack)
        return self._maps[key]

    def _compiled_map(self, function: MatrixFunction, stack: Tensor) -> MatrixFunction:
        from compiled_optim.torch_private import FakeTensorMode, make_fx

        with FakeTensorMode():
            example = torch.empty(stack.shape, dtype=stack.dtype, device=stack.device)
            module = make_fx(lambda given: [function(given)])(example)
        run, _ = self.lower(module, [example])

        def call(given: Tensor) -> Tensor:
            (result,) = run([given])
            return result

        return call

    def lower(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Lowered:
        """Compile with torchair. It does not report the number of kernels, so 0 is returned."""
        import torchair

        config = torchair.CompilerConfig()
        config.experimental_config.keep_inference_input_mutations = True
        config.experimental_config.frozen_parameter = False
        # torchair's converter for as_strided fails on 0-dim tensors
        decompositions = {
            **missing_foreach_decompositions(has_converter),
            torch.ops.aten.as_strided.default: skip_whole_view,
            torch.ops.aten.copy.default: skip_whole_copy,
            torch.ops.aten.clone.default: skip_clone,
            torch.ops.aten.mul.Tensor: ge_operations.product,
        }
        backend = torchair.get_npu_backend(compiler_config=config, custom_decompositions=decompositions)
        compiled = backend(module, inputs)
        return (lambda arguments: compiled(*arguments)), 0


class DeviceScalars(ScalarRows):
    """The first row of hyperparameters, in one tensor on the device."""

    def __init__(self, rows: ScalarRows, device: torch.device) -> None:
        row = rows.tensor[:1]
        self._source = bytes_of(row)
        self._staging = staging(max(row.nbytes, 1), device)
        self.tensor = self._staging.memory[: row.nbytes].view(row.dtype).view(1, -1)

    def send(self) -> None:
        """Copy the values of this step to the device."""
        buffer = self._staging.take()
        buffer.memory[: len(self._source)] = self._source
        self._staging.send(buffer, len(self._source))


class SendingBatch(BoundBatch):
    """A bound batch that sends its hyperparameters to the device first."""

    def __init__(self, batch: BoundBatch, scalars: DeviceScalars) -> None:
        super().__init__(batch.calls)
        self.runs = batch.runs
        self._batch, self._scalars = batch, scalars

    def __call__(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """Run the batch."""
        self._scalars.send()
        return self._batch(grads)


def staging(size: int, device: torch.device) -> Staging:
    """Return pinned memory for copies to an NPU."""
    return Staging(size, device, torch.npu.Event)  # type: ignore[attr-defined]


class NpuInductorBackend(AscendBackend):
    """Inductor's code for the NPU. Used only if it is selected by name."""

    name = "npu-inductor"
    compiler = "triton"
    compiler_remedy = "install triton-ascend"

    def lower(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Lowered:
        """Compile with Inductor, after torch_npu has registered the device with it."""
        importlib.import_module("torch_npu._inductor")
        return lower(module, inputs, {"size_asserts": False})


def has_converter(operation: OpOverload) -> bool:
    """Return True if torchair can convert an operation. A converter that only raises an error does not count."""
    from torchair._ge_concrete_graph.fx2ge_converter import _get_converter

    converter = _get_converter(operation)
    if converter is None:
        return False
    return not set(inspect.unwrap(converter).__code__.co_names) <= {"NotImplementedError", "RuntimeError"}


def _missing_device() -> str | None:
    """Return what is missing to use an NPU, torch_npu first, or None."""
    what = _missing("torch_npu", "install the release that belongs to this torch, and CANN")
    if what is None and not _sees_device():
        what = "torch_npu sees no NPU; check npu-smi info and ASCEND_RT_VISIBLE_DEVICES"
    return what


def _missing(module: str, remedy: str) -> str | None:
    """Return why a module cannot be imported, with the remedy, or None if it can."""
    if module not in sys.modules and find_spec(module) is None:
        return f"{module} is not installed; {remedy}"
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken installation raises many kinds of errors
        if ".so" in str(error):
            return (
                f"the CANN libraries were not found ({first_line(error)}); install the CANN toolkit and run its "
                "set_env.sh in the shell that starts Python"
            )
        return f"{module} cannot be imported ({first_line(error)}); {remedy}"
    return None


def _sees_device() -> bool:
    try:
        return bool(torch.npu.is_available())  # type: ignore[attr-defined]
    except Exception:  # a broken driver raises many kinds of errors
        return False
