"""The costs of compilation, of construction and of the first step."""

from __future__ import annotations

import json

import pytest
import torch

from perf import compile_cost, first_step, host_costs
from perf.__main__ import main
from perf.children import ChildError
from perf.contenders import CONTENDERS, OURS, Contender
from perf.report import FirstStep, HostCost, NewProcess, Spread


def nobody(what, fraction):
    """Show no progress."""


def test_first_steps_in_processes_of_their_own(small, monkeypatch, tmp_path):
    monkeypatch.setattr(
        compile_cost, "PROCESSES", [("cache", "ours eager", [("tiny_mlp", "first"), ("policy", "second")])]
    )
    found = list(compile_cost.first_steps("cpu", tmp_path, nobody))
    assert [(f.workload, f.situation, f.recompiles) for f in found] == [
        ("tiny_mlp", "first", 0),
        ("policy", "second", 0),
    ]
    monkeypatch.setattr(compile_cost, "PROCESSES", [("cache", "nobody", [("tiny_mlp", "first")])])
    with pytest.raises(ChildError, match=r"^first step of nobody on tiny_mlp failed: KeyError: 'nobody'$"):
        list(compile_cost.first_steps("cpu", tmp_path, nobody))
    counts = first_step.first_step("ours", "small", "cpu")
    assert counts["graphs"] >= 1
    assert counts["calls_per_step"] >= 1
    assert counts["recompiles"] == 0


LIGHT = """
import os, sys, pathlib
assert "compiled_optim" not in sys.modules and "perf.contenders" not in sys.modules
class AdamW:
    def __init__(self, params, lr, fused):
        assert len(params) == 20 and all(param.grad is not None for param in params) and fused
    def step(self):
        with open(pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "..", "steps"), "a") as steps:
            steps.write(__name__ + " ")
"""


def test_what_the_first_step_adds_to_import_torch(monkeypatch, tmp_path):
    (tmp_path / "light.py").write_text(LIGHT)
    (tmp_path / "heavy.py").write_text(f"import torch._inductor\n{LIGHT}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    fake = {"a": ("light", {"fused": True}), "b": ("heavy", {"fused": True})}
    monkeypatch.setattr(compile_cost, "AFTER_IMPORT", fake)
    monkeypatch.setattr(compile_cost, "AFTER_IMPORT_ROUNDS", 1)
    (tmp_path / compile_cost.AFTER_IMPORT_CACHE).mkdir()
    light, heavy = compile_cost.new_processes("cpu", tmp_path, nobody)
    assert (tmp_path / "steps").read_text().split() == ["light", "heavy"] * 2  # in turn, and the first is not counted
    assert (light.contender, heavy.contender) == ("a", "b")
    assert light.processes == heavy.processes == 1
    assert light.imported == []
    assert "torch._inductor" in heavy.imported
    assert light.import_torch.median > 0
    assert light.until_stepped.median > 0


def test_a_process_that_fails_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(compile_cost, "AFTER_IMPORT", {"a": ("json", {})})
    with pytest.raises(ChildError, match=r"^first step of a after import torch failed: AttributeError: "):
        list(compile_cost.new_processes("cpu", tmp_path, nobody))


def test_construction_and_first_step_of_further_optimizers(monkeypatch):
    groups, steps = [], []

    class Recorder(torch.optim.AdamW):
        def step(self, closure=None):
            super().step(closure)
            steps.append(next(iter(self.state.values()))["step"].item())

    def make(rule, given):
        groups.append([len(group["params"]) for group in given])
        return Recorder(given)

    monkeypatch.setitem(CONTENDERS, OURS, Contender(make, lambda rule: True))
    found = list(host_costs.measure("cpu", rounds=2))
    assert groups == [[1] * 200] * 3 + [[200]] * 3  # three times each: the first is not counted
    assert steps == [1, 1, 1]
    assert [(cost.contender, cost.baseline) for cost in found] == [
        (OURS, "torch loop"),
        ("torch loop", "torch loop"),
        (OURS, "torch fused"),
        ("torch fused", "torch fused"),
    ]
    assert "construct over 200 groups" in found[0].what
    assert "first step of a second optimizer, 200 tensors" in found[2].what
    assert all(cost.rounds == 2 and 0 < cost.time.low <= cost.time.median <= cost.time.high for cost in found)
    assert found[1].ratio == found[3].ratio == Spread(1.0, 1.0, 1.0)
    assert found[0].ratio.median > 0


def test_what_the_result_of_a_call_costs_to_free_is_not_measured(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(host_costs.time, "perf_counter", lambda: now[0])

    class Result:
        def __del__(self):
            now[0] += 100.0

    def call():
        now[0] += 1.0
        return Result()

    assert host_costs.wall_seconds(call, "cpu") == 1.0
    assert now[0] == 101.0


def test_the_report_has_all_costs_also_if_a_process_fails(monkeypatch, tmp_path, capsys):
    times = Spread(2.0, 1.0, 3.0)

    def first_steps(device, root, progress):
        yield FirstStep(OURS, "tiny_mlp", "cold", 9.0, 1, 1, 1, 0)

    def new_processes(device, root, progress):
        yield NewProcess(OURS, "tiny_mlp", 3, times, Spread(0.5, 0.25, 0.75), ["torch._inductor"])
        raise ChildError("the next one failed")

    def measure(device):
        yield HostCost("construct", OURS, 3, times, "torch loop", Spread(1.5, 1.25, 1.75))

    monkeypatch.setattr(compile_cost, "first_steps", first_steps)
    monkeypatch.setattr(compile_cost, "new_processes", new_processes)
    monkeypatch.setattr(host_costs, "measure", measure)
    path = tmp_path / "a.json"
    assert main(["--no-races", "--no-thread-scaling", "--no-memory", "--json", str(path)]) == 0
    said = capsys.readouterr().out
    assert "the next one failed" in said
    assert "2.00 (1.00–3.00)" in said
    assert "0.500 (0.250–0.750)" in said
    assert "torch._inductor" in said
    assert "1.50 (1.25–1.75) of torch loop" in said
    content = json.loads(path.read_text())
    assert [len(content[name]) for name in ("first_steps", "new_processes", "host_costs")] == [1, 1, 1]
    main(["--load", str(path)])
    assert capsys.readouterr().out == said
