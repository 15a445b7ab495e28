"""Compile cost does not grow with the model, and a second model does not compile again.

These tests count compilations. Compile times are measured by ``python -m perf``.
"""

from __future__ import annotations

import json
import os

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

import compiled_optim as co
from compiled_optim.backends import disk_cache
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
    assert explanation.graphs == 1
    assert explanation.kernels == 1
    assert explanation.calls_per_step == 1


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
import sys, torch, compiled_optim as co
params = [torch.nn.Parameter(torch.ones(n)) for n in {sizes}]
for param in params:
    param.grad = torch.ones_like(param)
optimizer = co.AdamW(params, lr=0.25, weight_decay=0)
optimizer.step()
optimizer.zero_grad()
optimizer.state_dict()
print(*(param[0].item() for param in params))
print(*(unit.source for unit in optimizer.explain().units))
print(*(name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules))
"""
COMPILED, LOADED = ("compiled now", True), ("disk cache", False)
"""Where a unit came from, and whether the process imported Dynamo and Inductor."""


@pytest.fixture
def first_step(tmp_path):
    """Return a function that makes a first step in a new process."""

    def run(sizes=(3, 40_000), **environment):
        code = MODEL.format(sizes=list(sizes))
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), **environment}
        values, source, imported = run_python(code, **environment).split("\n")[:3]
        assert values.split() == ["0.75"] * len(sizes)
        return source, bool(imported)

    return run


def records(tmp_path):
    return list((tmp_path / "cache" / "compiled_optim").glob("*.json"))


def libraries(tmp_path):
    return list((tmp_path / "cache" / "compiled_optim").glob("*.so"))


def test_another_process_with_another_model_traces_and_compiles_nothing(first_step):
    assert first_step([3, 50, 40_000]) == COMPILED
    assert first_step([7, 8, 9, 10, 11, 70_000, 80_000, 90_000]) == LOADED


def empty(path):
    path.write_bytes(b"")


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("files", [records, libraries])
@pytest.mark.parametrize("damage", [empty, truncate, flip_a_byte])
def test_damaged_files_are_made_again(files, damage, first_step, tmp_path):
    first_step()
    (path,) = files(tmp_path)
    damage(path)
    assert first_step() == COMPILED
    assert first_step() == LOADED


def test_a_library_that_computes_something_else_is_made_again(first_step, tmp_path):
    """A record that refers to the wrong library, with its right digest, is detected by running it."""
    first_step()
    (record,) = records(tmp_path)
    contents = json.loads(record.read_text())
    record.write_text(json.dumps({**contents, "unit": {**contents["unit"], "updates": False}}))
    assert first_step() == COMPILED
    assert first_step() == LOADED


def test_a_record_cannot_point_outside_of_the_directory(first_step, tmp_path):
    first_step()
    (record,), (library,) = records(tmp_path), libraries(tmp_path)
    library.rename(tmp_path / "outside.so")
    contents = json.loads(record.read_text())
    record.write_text(json.dumps({**contents, "library": "../../outside.so"}))
    assert first_step() == COMPILED


def test_disabled_caches_are_not_read(first_step):
    first_step()
    assert first_step(TORCHINDUCTOR_FORCE_DISABLE_CACHES="1") == COMPILED


def test_a_read_only_directory_is_enough_to_load(first_step, tmp_path):
    """The mode of a directory does not stop root, so the test looks for files that were written or touched."""
    first_step()
    cache = tmp_path / "cache"
    before = {path: path.stat().st_mtime_ns for path in [cache, *cache.rglob("*")]}
    for path in before:
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert first_step() == LOADED
    assert {path: path.stat().st_mtime_ns for path in [cache, *cache.rglob("*")]} == before


def test_the_directory_is_the_one_of_inductor(monkeypatch, tmp_path):
    for value in (str(tmp_path), None):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if value is not None:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", value)
        ours = disk_cache.directory()
        assert str(ours) == os.path.realpath(cache_dir())


def test_changed_settings_of_inductor_are_part_of_the_key(monkeypatch):
    before = disk_cache._inductor_settings()
    with torch._inductor.config.patch({"cpp.min_chunk_size": 7}):
        assert disk_cache._inductor_settings() != before
    assert disk_cache._inductor_settings() == before
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    assert disk_cache._inductor_settings() != before
