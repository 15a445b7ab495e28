"""torchair out of the unpacked torch_npu wheel, with a stand-in for its C++ module; its converters are its own.

A GE graph that would be handed to CANN is handed to :class:`GraphOnCpu` instead. In a process of its own.
"""

from __future__ import annotations

import collections
import os
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from compiled_optim.program import Phase

WHEEL = Path(os.environ.get("TORCH_NPU_WHEEL", Path(sys.prefix) / "torch_npu"))
"""Where the Makefile unpacks the wheel: not on the path, as without CANN torch_npu makes ``import torch`` raise."""


@dataclass
class Recording:
    """The GE graphs that were built, how often one was run, and how many inputs are not changed as they should be.

    ``copied_back`` counts mutated inputs that would be copied back, and inputs that are written without need.
    """

    graphs: list[Any] = field(default_factory=list)
    runs: int = 0
    copied_back: int = 0

    def clear(self) -> None:
        """Start anew."""
        self.__init__()

    def operations(self) -> dict[str, int]:
        """The operations of all graphs by type."""
        counts = collections.Counter(operation.type for graph in self.graphs for operation in graph.graph.op)
        return dict(sorted(counts.items()))

    def watch(self, backend: type[Any]) -> None:
        """See to which inputs a graph writes, and whether each is the reference of an output."""
        make = backend.graph

        def graph(self_, signature):
            made = make(self_, signature)
            written = range(1, len(signature.dtypes))  # all lists but the gradients
            measures = getattr(signature.program, "phase", None) is Phase.MEASURE  # and must write nothing
            mutated = {place for place, (i, _) in enumerate(made.inputs) if i in written and not measures}
            self.copied_back += len(mutated ^ set(self.graphs[-1]._graph_output_ref_input.values()))
            return made

        backend.graph = graph


def install() -> Recording:
    """Make ``import torchair`` work, and record what it builds."""
    recording = Recording()

    class GraphOnCpu:
        """What torchair loads a serialized graph into, and runs."""

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
        get_registered_ir_def=lambda name: ("None", [], [], []),
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
