"""The example backend of the documentation: it records every graph and runs it without compiling."""

from __future__ import annotations

from typing import Any

import torch

from compiled_optim.backends import Availability, WholeListBackend


class RecordingBackend(WholeListBackend):
    """Keeps the graphs of the programs; their operations run one by one."""

    name = "recording"
    devices = ("cpu",)
    limit = 100

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[torch.fx.GraphModule] = []

    def available(self) -> Availability:
        """Whether it works here; if not, ``Availability(False, "what is missing; what to do")``. Must not raise."""
        return Availability(True)

    def lower(self, module: torch.fx.GraphModule, inputs: list[Any]) -> tuple[Any, int]:
        """Compile a graph: return a function of the list of its inputs, and the number of its kernels."""
        self.graphs.append(module)
        return (lambda arguments: module(*arguments)), 0
