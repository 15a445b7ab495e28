"""A race: which contenders it lists, and that a contender that does not really step is an error."""

from __future__ import annotations

import importlib.machinery
import sys
import types

import pytest
import torch

import perf.contenders
import perf.race
from perf import render
from perf.cases import Case
from perf.contenders import CONTENDERS, Contender
from perf.memory import Memory
from perf.optimizers import RULES
from perf.race import Length, Race
from perf.report import Report

from .racing import CPU, EAGER, race


@pytest.fixture(scope="module")
def memory():
    return Memory(CPU)


def test_everybody_is_listed_absent_or_not(small, memory, nothing_installed):
    rows = race(memory, "AdamW", [], rounds=1)
    assert list(rows) == [name for name, made in CONTENDERS.items() if made.stored is None]
    status = {name: row.status for name, row in rows.items()}
    assert [status[name] for name in ("ours", "torch fused", "torch foreach", "torch loop")] == ["ok"] * 4
    assert [status[name] for name in ("heavyball", "optimi", "deepspeed")] == ["absent"] * 3
    assert status["usual foreach"] == status["adamp"] == "none"
    report = Report({}, "", "", rows=list(rows.values()))
    assert "absent: heavyball, optimi, deepspeed (not installed: pip install .[peers])" in render.text(report)
    assert "not measured: heavyball, optimi, deepspeed: not installed: pip install .[peers]" in render.markdown(report)


def test_deepspeed_takes_part_if_it_is_installed(small, memory, monkeypatch):
    """A module in its place has the class and the arguments of DeepSpeedCPUAdam."""

    class DeepSpeedCPUAdam(torch.optim.AdamW):
        def __init__(self, params, lr, weight_decay=0, adamw_mode=True, fp32_optimizer_states=True):
            assert (adamw_mode, fp32_optimizer_states) == (True, False)
            super().__init__(params, lr=lr, weight_decay=weight_decay)

    for name in ("deepspeed", "deepspeed.ops", "deepspeed.ops.adam"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    module.DeepSpeedCPUAdam = DeepSpeedCPUAdam
    assert "deepspeed" in [name for name, row in race(memory, "AdamW", [], rounds=1).items() if row.status == "ok"]
    assert race(memory, "AdamW", ["ours eager", "deepspeed"])["ours eager"].baseline == "deepspeed"
    assert race(memory, "SGD", ["deepspeed"])["deepspeed"].status == "none"


def test_who_compiles_whole_models_has_to_be_asked_for_on_large_ones(memory):
    name = "torch.compile(step)"
    rows = {r.contender: r for r in Race(Case("resnet50", "AdamW"), CPU, memory, Length()).rows()}
    asked = Race(Case("resnet50", "AdamW"), CPU, memory, Length(), [name]).rows()[0]
    assert rows[name].status == "skipped"
    assert f'--contender "{name}"' in rows[name].reason
    assert asked.status == "interrupted"  # it would have run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", RULES)
def test_implementations_agree(optimizer, dtype, small, memory):
    """Ours against code of others, in a race: whoever computes something else is an error."""
    rows = race(memory, optimizer, EAGER, dtype=dtype, rounds=1)
    assert rows["ours eager"].status == "ok", rows["ours eager"].reason
    assert {row.status for row in rows.values()} <= {"ok", "none"}
    assert sum(row.status == "ok" for row in rows.values()) >= 2


class DropsGradients(torch.optim.AdamW):
    """Steps, and throws the gradients away, as one package does: the next step would find nothing to do."""

    def step(self, closure=None):
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            param.grad = None


class Lazy(torch.optim.AdamW):
    def step(self, closure=None):
        return None


class Tiring(torch.optim.AdamW):
    """Steps while it is checked, and no longer."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure) if self.steps <= perf.race.CHECKED_STEPS else None


class Collapsing(Tiring):
    """Fails after a while."""

    def step(self, closure=None):
        if self.steps > perf.race.CHECKED_STEPS + 3:
            raise ValueError("enough")
        self.steps += 1
        return torch.optim.AdamW.step(self, closure)


class Poisonous(torch.optim.AdamW):
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.data.fill_(float("nan"))


class Broken(torch.optim.AdamW):
    def step(self, closure=None):
        raise ValueError("out of luck\nand more")


@pytest.mark.parametrize(
    ("cls", "options", "status", "reason"),
    [
        (DropsGradients, {}, "ok", ""),
        (Lazy, {}, "error", "did not step: the parameters are what they were"),
        (Tiring, {}, "error", "stopped stepping while it was timed"),
        (Collapsing, {}, "error", "ValueError: enough"),
        (Broken, {}, "error", "ValueError: out of luck"),
        (torch.optim.AdamW, {"lr": 1.1e-3}, "error", "computes something else: 0.1"),
        (Poisonous, {}, "error", "computes something else: nan"),
    ],
    ids=["drops gradients", "lazy", "tiring", "collapsing", "broken", "wrong", "poisonous"],
)
def test_a_contender_that_does_not_really_step_is_an_error(cls, options, status, reason, small, memory, monkeypatch):
    made = Contender(lambda rule, params: cls(params, **{**rule.options, **options}), lambda rule: True)
    monkeypatch.setitem(CONTENDERS, "suspect", made)
    rows = race(memory, "AdamW", ["suspect", "torch fused"])
    assert (rows["suspect"].status, rows["suspect"].reason[: len(reason)]) == (status, reason)
    assert rows["torch fused"].status == "ok"
    assert (rows["suspect"].time is None) == (status == "error")
    if status == "error":
        assert f"ERROR suspect: {reason}" in render.text(Report({}, "", "", rows=list(rows.values())))
