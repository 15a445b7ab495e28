"""Import torchair from the unpacked torch_npu wheel, with a replacement for its C++ module.

torchair's own converters are used unchanged. A GE graph goes to :class:`GraphOnCpu` and not to CANN. Use this only in a
separate process.
"""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from compiled_optim.backends import npu
from compiled_optim.backends.staging import Buffer, Staging, bytes_of
from compiled_optim.update_program import Phase

WHEEL = Path(os.environ.get("TORCH_NPU_WHEEL", Path(sys.prefix) / "torch_npu"))
"""Where the Makefile unpacks the wheel. It is not on the path: without CANN, torch_npu makes ``import torch`` fail."""

NEVER_CHANGED = ("p0",)
"""The states that a rule only reads. They are written only if they are rounded."""


@dataclass
class Recording:
    """The GE graphs that were built, the number of runs, and the number of inputs that are written wrongly.

    ``copied_back`` counts inputs that are mutated through a copy and inputs that are written but should not be.
    """

    graphs: list[Any] = field(default_factory=list)
    runs: int = 0
    copied_back: int = 0

    def clear(self) -> None:
        """Forget everything recorded so far."""
        self.__init__()

    def compute_nodes(self) -> list[int]:
        """Return the number of nodes that compute something, for each graph."""
        idle = ("Data", "RefData", "Const", "NetOutput")
        return [sum(operation.type not in idle for operation in graph.graph.op) for graph in self.graphs]

    def operations(self) -> dict[str, int]:
        """Return the number of operations of each type in all graphs."""
        counts = collections.Counter(operation.type for graph in self.graphs for operation in graph.graph.op)
        return dict(sorted(counts.items()))

    def watch(self, backend: type[Any]) -> None:
        """Count, for each graph the backend builds, where mutated inputs and references of outputs differ."""
        make = backend.graph

        def graph(self_, signature):
            made = make(self_, signature)
            written = range(1, len(signature.dtypes))  # all lists but the gradients
            measures = getattr(signature.program, "phase", None) is Phase.MEASURE  # a measuring phase writes to no list
            mutated = {place for place, (i, _) in enumerate(made.inputs) if i in written and not measures}
            kept = [2 + i for i, state in enumerate(getattr(signature.program, "states", ())) if state in NEVER_CHANGED]
            either = {place for place, (i, _) in enumerate(made.inputs) if i in kept}
            self.copied_back += len((mutated ^ set(self.graphs[-1]._graph_output_ref_input.values())) - either)
            return made

        backend.graph = graph


class HostStaging(Staging):
    """Copies to the test device, which is host memory: it has no pinned memory and no events."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(size, device, Done)

    def _new(self) -> Buffer:
        tensor = torch.zeros(len(self.memory), dtype=torch.uint8)
        return Buffer(bytes_of(tensor), tensor, Done())


class Done:
    """The event behind a copy that is done when the call returns."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Let the interpreter replace CANN, and host memory the device. Everything else is as on hardware."""
    with (
        mock.patch.object(npu, "_missing_device", return_value=None),
        mock.patch.object(npu, "staging", HostStaging),
    ):
        yield


def install() -> Recording:
    """Make ``import torchair`` work, and record the graphs that it builds."""
    recording = Recording()

    class GraphOnCpu:
        """Replacement for the C++ class into which torchair loads a serialized graph, and which runs it."""

        def __init__(self, name: str = "") -> None:
            self.model = b""

        def load(self, model: bytes, *options: Any) -> None:
            self.model = model

        def set_hint_shape(self, *shapes: Any) -> None: ...

        def compile(self) -> None: ...

        def run(self, arguments: Any) -> list[Any]:
            from tests.hardware_free import ge_interpreter

            inputs, assigned, _ = arguments
            recording.runs += 1
            return ge_interpreter.run(self.model, list(inputs), assigned)

    core = types.ModuleType("torchair.core._torchair")
    core.__dict__.update(
        TorchNpuGraphBase=GraphOnCpu,
        TorchDataType=mock.MagicMock(),
        InitializeGraphEngine=lambda options: None,
        FinalizeGraphEngine=lambda: None,
        InitDeviceStdoutChannel=lambda device: None,
        SetDebugLogPath=lambda path: None,
        GetSocName=lambda: "Ascend910B1",
        check_cann_compat=lambda *args: "",
        get_registered_ir_def=lambda name: ("SUCCESS", [], [], []),
    )
    sys.modules["torchair.core._torchair"] = core
    sys.path.insert(0, str(WHEEL / "torch_npu" / "dynamo"))
    from torchair._ge_concrete_graph.fx2ge_converter import GeConcreteGraph

    optimize = GeConcreteGraph.optimize_graph_without_runtime

    def optimize_and_record(graph, *args, **kwargs):
        result = optimize(graph, *args, **kwargs)
        recording.graphs.append(graph)
        return result

    GeConcreteGraph.optimize_graph_without_runtime = optimize_and_record
    return recording
