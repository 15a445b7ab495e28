"""The CUDA backend. Not built yet: it says so, and nothing runs eagerly in silence."""

from __future__ import annotations

import torch

from compiled_optim.backends.base import Availability
from compiled_optim.backends.unbuilt import UnbuiltBackend


class CudaBackend(UnbuiltBackend):
    """Answers for device type ``cuda``."""

    name = "cuda"
    devices = ("cuda",)

    def available(self) -> Availability:
        """Say what is missing, from the hardware up."""
        if torch.version.cuda is None:
            return self.missing("this build of torch has no CUDA support")
        if not torch.cuda.is_available():
            return self.missing("torch sees no CUDA device")
        return self.missing("compiling for CUDA is not implemented in this version")
