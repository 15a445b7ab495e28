"""Script: lower flat buffers with torchair's converters, step them on device ``npu``, and print the results as JSON.

The tensors are in CPU memory, and an interpreter runs the GE graphs.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import compiled_optim as co
from catalog import CATALOG
from compiled_optim import backends
from compiled_optim.backends import Signature, npu
from compiled_optim.engine.plan import clips_any
from compiled_optim.engine.sorting import make_buckets
from tests import npu_device
from tests.hardware_free import steps, torchair_without_cann
from tests.hardware_free.seed_scripts import seed_scripts
from tests.hardware_free.torchair_without_cann import Recording
from tests.helpers import distance, params_of

COUNTS = (5, 20, 161)
STEPS = 10
CASES = {**{name: (name, {}) for name in steps.OPTIMIZERS}, **steps.VARIANTS}


STORED: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bfloat16 states": (torch.float32, {"state_dtype": torch.bfloat16, "rounding": "nearest"}),
    "master weights": (torch.bfloat16, {"master_weights": True}),
    "bfloat16": (torch.bfloat16, {}),
}
REFUSED: dict[str, dict[str, Any]] = {
    "8bit": {"state_dtype": "8bit"},
    "stochastic": {"rounding": "stochastic"},
    "stochastic states": {"state_dtype": torch.bfloat16},
}


def shapes(count: int) -> list[tuple[int, ...]]:
    """Return this many shapes, of weights and biases in turn."""
    pairs = [shape for pair in zip(steps.TWENTY[:10], steps.TWENTY[10:], strict=True) for shape in pair]
    return [pairs[i % len(pairs)] for i in range(count)]


def signatures(name: str, count: int, dtype: torch.dtype, **options: Any) -> list[Signature]:
    """Return what a step over this many tensors compiles."""
    optimizer = steps.optimizer(name, shapes(count), dtype, **options)
    params = params_of(optimizer)
    found = make_buckets(
        optimizer, optimizer.param_groups, {}, params, lambda: [""] * count, lambda device: (backends.get("npu"), True)
    )
    batches = [batch for bucket in found for batch in bucket.batches(clips_any(optimizer, optimizer.param_groups))]
    for batch in batches:
        batch.device = "npu"
    return [call.signature for batch in batches for call in batch.calls]


def nodes(recording: Recording) -> dict[str, Any]:
    """Return, for each optimizer and dtype, the compute nodes of each kind of graph, by the number of tensors."""
    found: dict[str, Any] = {}
    backend, known = backends.get("npu"), {}
    for case, (name, options) in CASES.items():
        for dtype in (torch.float32, torch.bfloat16):
            of_case = found[f"{case} {str(dtype).removeprefix('torch.')}"] = {}
            for count in COUNTS:
                kinds: dict[str, set[int]] = {}
                for signature in signatures(name, count, dtype, **options):
                    if signature not in known:
                        recording.clear()
                        with torch.no_grad():
                            backend.graph(signature)
                        (known[signature],) = recording.compute_nodes()
                    kinds.setdefault(str(signature), set()).add(known[signature])
                of_case[count] = {kind: sorted(numbers) for kind, numbers in kinds.items()}
    return found


def stepped(name: str, make: Any, device: str, dtype: torch.dtype, **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer over twenty tensors after some steps, each with another learning rate."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in steps.TWENTY]
    params = [torch.nn.Parameter(value.to(dtype).to(device)) for value in values]
    optimizer = make(params, **{**steps.OPTIMIZERS[name], **options})
    for step in range(STEPS):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(dtype).to(device)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        optimizer.step()
    return optimizer


def executed(recording: Recording) -> dict[str, Any]:
    """Return, for each optimizer, the difference from torch.optim or the formula of its paper, and what was built."""
    found = {}
    for name in steps.OPTIMIZERS:
        recording.clear()
        backends.get("npu")._units.clear()  # so that each case compiles its own graphs
        ours = stepped(name, getattr(co, name), "npu", torch.float32, on_realloc="raise")
        theirs = stepped(name, CATALOG[name].reference, "cpu", torch.float32)
        report = ours.explain()
        graphs = len(recording.graphs)
        other = getattr(co, name)([torch.nn.Parameter(torch.ones(700, 7).to("npu"))], **steps.OPTIMIZERS[name])
        params_of(other)[0].grad = torch.ones(700, 7).to("npu")
        runs = recording.runs
        other.step()
        found[name] = dict(
            apart=max(distance(a, b) for a, b in zip(params_of(ours), params_of(theirs), strict=True)),
            units=sorted({unit for batch in report.batches for unit in batch.units}),
            graphs=graphs,
            graphs_of_another_model=len(recording.graphs) - graphs,
            copied_back=recording.copied_back,
            recompiles=report.recompiles,
            runs_of_steps=runs - graphs,  # each graph also runs once to be verified
            calls_of_steps=report.calls_per_step * STEPS,
            inputs=max(sum(operation.type == "Data" for operation in graph.graph.op) for graph in recording.graphs),
        )
    return found


def stored() -> dict[str, Any]:
    """Return the differences of AdamW in other storages from torch.optim in float64, and the messages of refusals."""
    found: dict[str, Any] = {}
    exact = stepped("AdamW", torch.optim.AdamW, "cpu", torch.float64)
    for label, (dtype, options) in STORED.items():
        ours = stepped("AdamW", co.AdamW, "npu", dtype, **options)
        pairs = zip(params_of(ours), params_of(exact), strict=True)
        found[label] = dict(
            apart=max(float((a.detach().cpu().double() - b.detach()).square().mean().sqrt()) for a, b in pairs),
            units=sorted({unit for batch in ours.explain().batches for unit in batch.units}),
        )
    for label, options in REFUSED.items():
        try:
            co.AdamW([torch.nn.Parameter(torch.ones(64, 64).to("npu"))], **options)
        except NotImplementedError as error:
            found[label] = str(error)
    return found


def main() -> None:
    npu_device.install()
    recording = torchair_without_cann.install()
    recording.watch(npu.NpuBackend)
    with torchair_without_cann.interpreted():
        report = {"nodes": nodes(recording), "executed": executed(recording), "seeds": seed_scripts()}
        report["stored"] = stored()
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
