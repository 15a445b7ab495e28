"""Compile cost does not grow with the model, and a second model does not compile again.

These tests count compilations. Compile times are measured by ``python -m perf``.
"""

from __future__ import annotations

import json

import pytest
import torch

import compiled_optim as co
from perf.workloads import WORKLOADS
from tests.helpers import run_python


def units_of(shapes):
    params = [torch.nn.Parameter(torch.empty(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer = co.AdamW(params)
    optimizer.step()
    return optimizer.explain()


@pytest.mark.parametrize("workload", ["tiny_mlp", "thousand_tensors", "resnet50"])
def test_units_do_not_grow_with_the_model(workload):
    shapes = WORKLOADS[workload].shapes
    explanation = units_of(shapes)
    assert explanation.graphs <= 2
    assert explanation.kernels <= 6
    assert explanation.calls_per_step <= len(shapes) / 2


def test_workloads_are_what_they_say():
    counts = {
        name: (len(workload.shapes), sum(torch.Size(shape).numel() for shape in workload.shapes))
        for name, workload in WORKLOADS.items()
    }
    assert counts["resnet50"] == (161, 25_557_032)
    assert counts["gpt2_small"] == (148, 124_439_808)
    assert counts["tiny_mlp"][0] == 20
    assert counts["thousand_tensors"][0] == 1000
    assert len(set(WORKLOADS["thousand_tensors"].shapes)) == 50


MODEL = """
import torch, compiled_optim as co
from torch._dynamo.utils import counters
params = [torch.nn.Parameter(torch.ones(n)) for n in {sizes}]
for param in params:
    param.grad = torch.ones_like(param)
optimizer = co.AdamW(params, lr=0.25, weight_decay=0)
optimizer.step()
print(counters["aot_autograd"]["total"], optimizer.explain().graphs, *(param[0].item() for param in params))
"""


def test_another_process_with_another_model_traces_and_compiles_nothing(tmp_path):
    def run(sizes):
        traced, graphs, *values = run_python(MODEL.format(sizes=sizes), TORCHINDUCTOR_CACHE_DIR=str(tmp_path)).split()
        assert values == ["0.75"] * len(sizes)
        assert graphs == "2"
        return int(traced)

    assert run([3, 50, 40_000]) == 2
    assert run([7, 8, 9, 10, 11, 70_000, 80_000, 90_000]) == 0
    # damaged files are created again: first the records, then the code they refer to
    for record in (tmp_path / "compiled_optim").iterdir():
        record.write_text("{")
    assert run([3, 40_000]) == 2
    for record in (tmp_path / "compiled_optim").iterdir():
        contents = json.loads(record.read_text())
        contents["inputs"].reverse()
        record.write_text(json.dumps(contents))
    assert run([3, 40_000]) == 2, "taken from disk, found to compute something else, and compiled again"
    assert run([3, 40_000]) == 0


def test_records_are_not_used_where_caches_are_disabled_or_they_point_outside(tmp_path):
    cache = tmp_path / "cache"

    def traced(**environment):
        printed = run_python(MODEL.format(sizes=[3]), TORCHINDUCTOR_CACHE_DIR=str(cache), **environment)
        return int(printed.split()[0])

    assert traced() == 1
    assert traced() == 0
    assert traced(TORCHINDUCTOR_FORCE_DISABLE_CACHES="1") == 1
    (record,) = (cache / "compiled_optim").iterdir()
    contents = json.loads(record.read_text())
    outside = tmp_path / "outside.py"
    outside.write_bytes((cache / contents["module"]).read_bytes())
    record.write_text(json.dumps({**contents, "module": "../outside.py"}))
    assert traced() == 1
