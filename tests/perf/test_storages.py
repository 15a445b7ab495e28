"""Storages in the report: they step right, have their own bytes to move, and their memory is what is measured."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

import compiled_optim as co
from perf import storage_memory
from perf.cases import DEFAULT, Case
from perf.check import judge
from perf.contenders import CONTENDERS, not_entered
from perf.memory import Memory
from perf.optimizers import RULES
from perf.race import Length, Race, moved_bytes
from perf.run import Request
from perf.step_memory import CLEAR_REFS, buffers, memory_of, resident_growth
from perf.storages import OWN
from perf.workloads import WORKLOADS, Workload

from .racing import CPU, race


@pytest.fixture
def large(monkeypatch):
    """A workload of one tensor that is large enough for 8-bit states."""
    monkeypatch.setitem(WORKLOADS, "large", Workload("large", [(64, 128)]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_storages_are_checked_and_timed(large, dtype):
    names = [name for name, way in OWN.items() if way.dtype == dtype]
    rows = race(Memory(CPU), "AdamW", ["ours", "torch fused", *names], "large", dtype)
    for name in names:
        assert (rows[name].status, rows[name].reason) == ("ok", "")
        assert rows[name].to_plain.median > 0
        assert rows[name].to_plain != rows[name].ratio
    assert rows["ours"].to_plain is None
    moved = {name: row.moved_bytes for name, row in rows.items()}
    if dtype == "float32":
        assert moved == {"ours": 28, "torch fused": 28, "ours, bf16 states": 20, "ours, 8-bit states": 16}
    else:
        assert [moved[name] for name in names] == [14, 18, 30]


def test_a_storage_is_held_to_its_own_tolerance():
    start, expected = torch.zeros(4), torch.ones(4)
    assert judge(start, 0.9 * expected, expected)[1] != ""
    assert judge(start, 0.9 * expected, expected, tolerance=0.15)[1] == ""
    assert judge(start, 0.8 * expected, expected, tolerance=0.15)[1] != ""


def test_storages_take_part_where_a_case_compares_them(small):
    def names(case, asked=()):
        return set(Race(case, CPU, Memory(CPU), Length(1), asked).results)

    assert not names(Case("small", "AdamW")) & OWN.keys()
    assert names(Case("small", "AdamW", storages=True)) == set(CONTENDERS)
    assert {str(case) for case in DEFAULT if case.storages} == {
        f"{workload} AdamW {dtype}" for workload in ("resnet50", "gpt2_small") for dtype in ("float32", "bfloat16")
    }
    assert not_entered("ours, kahan", RULES["AdamW"], "cpu", 4, True)[1] == "is for bfloat16 parameters"
    assert not_entered("ours, kahan", RULES["SGD"], "cpu", 4, True, "bfloat16")[1] == "has no SGD"


def test_one_option_asks_for_all_storages():
    def request(workloads=(), dtypes=()):
        options = dict(scaling=[], races=True, storages=True, compile_cost=False, memory=[])
        return Request.of(workloads, [], dtypes, [], "cpu", None, **options)

    assert request().contenders == ["torch fused", "ours", *OWN]
    assert {str(case) for case in request().cases} == {str(case) for case in DEFAULT if case.storages}
    assert [str(case) for case in request(["tiny_mlp"], ["bfloat16"]).cases] == ["tiny_mlp AdamW bfloat16"]


def test_bytes_are_those_of_the_tensors(large):
    params = [torch.nn.Parameter(torch.randn(64, 128)), torch.nn.Parameter(torch.randn(7))]
    for param in params:
        param.grad = torch.randn_like(param)
    ours = co.AdamW(params, compile=False, state_dtype="8bit")
    theirs = torch.optim.AdamW(params)
    for optimizer in (ours, theirs):
        optimizer.step()
    sizes = buffers(ours, params)
    count = sum(param.numel() for param in params)
    for name in ("exp_avg", "exp_avg_sq", "exp_avg_scale"):
        kept = [ours.state[param][name] for param in params if name in ours.state[param]]
        assert sizes[name] == pytest.approx(sum(tensor.nbytes for tensor in kept) / count)
    assert sizes["weights"] == sizes["gradients"] == 4.0
    found = buffers(theirs, params)
    assert found == {"weights": 4.0, "gradients": 4.0, "exp_avg": 4.0, "exp_avg_sq": 4.0, "step": 8 / count}
    assert moved_bytes(ours) == round(4 + 2 * (sum(sizes.values()) - 4))


def test_shared_memory_is_counted_once():
    tensor = torch.zeros(100)
    assert memory_of([tensor, tensor[:50], tensor.view(10, 10)]) == 400


@pytest.mark.skipif(not os.access(CLEAR_REFS, os.W_OK), reason="only Linux tells the peak of a part of a process")
def test_the_peak_of_a_step_is_seen_outside_of_torch():
    kept = torch.ones(8, 1 << 20)

    def touch_new_memory():  # not by malloc, which may have memory that is resident already
        with mmap.mmap(-1, 64 << 20) as memory:
            for page in range(0, len(memory), mmap.PAGESIZE):
                memory[page] = 1

    assert resident_growth(touch_new_memory) >= 60 << 20
    assert resident_growth(lambda: kept.mul_(2)) < 8 << 20


def test_memory_is_measured_in_processes(monkeypatch, nothing_installed):
    monkeypatch.setattr(
        storage_memory, "MEASURED", [("torch foreach", "float32"), ("torchao 8-bit", "float32"), ("nobody", "float32")]
    )
    monkeypatch.setitem(CONTENDERS, "nobody", CONTENDERS["ours"])  # the child does not know it
    ok, absent, error = storage_memory.memory_rows("cpu", "tiny_mlp", lambda what, fraction: None)
    assert ok.buffers == {"weights": 4.0, "gradients": 4.0, "exp_avg": 4.0, "exp_avg_sq": 4.0}
    assert ok.step >= 4.0  # a temporary of the size of the parameters
    assert ok.total == 16.0 + ok.step
    assert (absent.status, absent.reason) == ("absent", "not installed: pip install .[peers]")
    assert error.status == "error"
    assert "KeyError" in error.reason
