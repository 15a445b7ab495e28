"""The CUDA backend: whole lists, compiled by Inductor to a few Triton kernels.

Limit: a step cannot be captured in a CUDA graph, and an attempt raises RuntimeError. Kernels get the learning rate and
the other scalars from host memory at launch, so a captured graph would replay the values of the recorded step.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from compiled_optim.backends.base import Availability, BoundArguments, Call, Shape
from compiled_optim.backends.inductor import Lowered, lower
from compiled_optim.backends.whole_lists import REMEDY, ListUnit, WholeListBackend
from compiled_optim.program import TensorLists

OPTIONS: dict[str, Any] = {
    # one kernel for all reductions of the same kind (norms); by default there is one kernel per tensor
    "combo_kernels": True,
    # as many as fit: every GPU and driver accepts 4 KB of kernel arguments, at 8 bytes each
    "combo_kernel_max_num_args": 500,
    # with the default of 8, 20 tensors with reductions take 1.5 times as many launches; above 32 there is no gain
    "combo_kernel_max_num_nodes": 32,
    "size_asserts": False,
}


class CudaUnit(ListUnit):
    """A unit that raises if it is called during CUDA graph capture."""

    def bind(self, shapes: Sequence[Shape], lists: TensorLists, arguments: BoundArguments) -> Call:
        """Bind the unit; the call checks first that the current stream is not capturing."""
        run = super().bind(shapes, lists, arguments)

        def call(grads: Sequence[Tensor | None]) -> Tensor | None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "an optimizer step cannot be captured in a CUDA graph, because the graph would replay the learning "
                    "rate of the captured step; capture forward and backward, and call step() outside"
                )
            return run(grads)

        return call


class CudaBackend(WholeListBackend):
    """Inductor's Triton code, one unit for each list of shapes."""

    name = "cuda"
    devices = ("cuda",)
    limit = 40
    """Compilation takes 0.4 s (AdamW) to 0.9 s (Lamb) per tensor on one core, whatever the length of the list, so a
    graph of 40 tensors compiles in less than 40 s. A kernel of an elementwise rule holds 22 tensors, so longer lists
    would not save launches."""

    unit_type = CudaUnit

    def available(self) -> Availability:
        """Check torch, the device, Triton and the C compiler, in this order; report the first that is missing."""
        if torch.version.cuda is None and torch.version.hip is None:
            what = "this build of torch has no CUDA support; install one that has"
        elif not torch.cuda.is_available():
            what = "torch sees no CUDA device; check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        elif find_spec("triton") is None:
            what = "triton is not installed; install the version that belongs to this torch (pip install triton)"
        elif not any(map(shutil.which, [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"])):
            what = "no C compiler was found, which Triton needs; install gcc or name one in the variable CC"
        else:
            return Availability(True)
        return Availability(False, f"{what}, or {REMEDY}")

    def lower(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Lowered:
        """Compile with Inductor."""
        return lower(module, inputs, OPTIONS)
