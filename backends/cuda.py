"""The CUDA backend: whole lists, compiled by Inductor to a handful of Triton kernels.

Not for use under CUDA graphs: learning rate and the other scalars are read from host memory when a kernel is launched,
and a captured graph would repeat the values of the step it recorded. Such a step is refused.
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
    # one kernel for all reductions of a kind (norms): without it there is one for each tensor
    "combo_kernels": True,
    # as many as fit: a kernel takes 4 KB of arguments, at 8 bytes each, on every GPU and driver
    "combo_kernel_max_num_args": 500,
    # at 8, the default, 20 tensors with reductions take half as many launches again; above 32 nothing is gained
    "combo_kernel_max_num_nodes": 32,
    "size_asserts": False,
}


class CudaUnit(ListUnit):
    """A unit that refuses to be captured in a CUDA graph."""

    def bind(self, shapes: Sequence[Shape], lists: TensorLists, arguments: BoundArguments) -> Call:
        """Bind as all units do, and check the stream before each call."""
        run = super().bind(shapes, lists, arguments)

        def call(grads: Sequence[Tensor]) -> Tensor | None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "an optimizer step cannot be captured in a CUDA graph: its learning rate would be frozen in the "
                    "recording; capture forward and backward, and call step() outside"
                )
            return run(grads)

        return call


class CudaBackend(WholeListBackend):
    """Inductor's Triton code, one unit for each list of shapes."""

    name = "cuda"
    devices = ("cuda",)
    limit = 40
    """Compiling takes 0.4 s a tensor (AdamW) to 0.9 s (Lamb) of one core, however long the list: 40 keep a graph under
    40 s. A kernel of an elementwise rule holds 22 tensors, so a longer list would not save it a launch."""

    unit_type = CudaUnit

    def available(self) -> Availability:
        """Say what is missing, from the software up."""
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
