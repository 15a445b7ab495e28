"""The Ascend NPU backend. Not built yet: it says so, and nothing runs eagerly in silence."""

from __future__ import annotations

from importlib.util import find_spec

from compiled_optim.backends.base import Availability
from compiled_optim.backends.unbuilt import UnbuiltBackend


class NpuBackend(UnbuiltBackend):
    """Answers for device type ``npu``."""

    name = "npu"
    devices = ("npu",)

    def available(self) -> Availability:
        """Say what is missing, from the software up."""
        if find_spec("torch_npu") is None:
            return self.missing("torch_npu is not installed")
        return self.missing("compiling for the NPU is not implemented in this version")
