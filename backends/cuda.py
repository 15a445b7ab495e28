"""The CUDA backend: one launch for each pass over all tensors of a batch, over a table of pointers (``triton_table``).

Limit: a step cannot be captured in a CUDA graph, and an attempt raises RuntimeError. The addresses of the gradients and
the hyperparameters are copied to the device from host memory that the next steps overwrite, so a captured graph would
replay whatever is there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from compiled_optim.backends import triton_compiler
from compiled_optim.backends.base import Availability, Signature, Unit
from compiled_optim.backends.table_backend import TableBackend
from compiled_optim.backends.triton_table import MAX_CLIPS, launch_clip
from compiled_optim.backends.whole_lists import REMEDY


class CudaBackend(TableBackend):
    """Inductor's Triton code, run by a driver in Triton."""

    name = "cuda"
    devices = ("cuda",)
    seconds_per_unit = 2.0
    whole_blocks = True
    skips_on_device = True

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

    def settings(self, signature: Signature) -> Mapping[str, Any]:
        """Return the settings of Inductor, the version of Triton and the kind of GPU."""
        return triton_compiler.settings(signature)

    def load_table(self, signature: Signature) -> Unit | None:
        """Return the unit of a signature from disk, or None if it has to be compiled."""
        return triton_compiler.load_triton_table(signature)

    def compile_table(self, signature: Signature) -> Unit:
        """Compile the unit of a signature; raise CannotRecord if its code does not fit the driver."""
        return triton_compiler.compile_triton_table(signature)

    def clips_at_once(self, dtype: torch.dtype, clips: int) -> bool:
        """Return True for float32, because a launch takes numbers with 32 bits, and for few clips."""
        return dtype == torch.float32 and clips <= MAX_CLIPS

    def clip(
        self,
        squares: Tensor,
        limits: Sequence[tuple[float, float]],
        maximize: bool,
        inv_scale: Tensor | None,
        grad_scale: Tensor,
    ) -> Tensor:
        """Write the factor that clips gradients by their norm into ``grad_scale``, in one launch; return the norm."""
        return launch_clip(squares, limits, maximize, inv_scale, grad_scale)

    def check_step(self) -> None:
        """Raise if the current stream is capturing."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "an optimizer step cannot be captured in a CUDA graph, because the graph would replay the learning "
                "rate of another step; capture forward and backward, and call step() outside"
            )
