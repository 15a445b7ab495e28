"""Races with several parameter groups and with gradients that are missing in some steps."""

from __future__ import annotations

import pytest
import torch

import perf.race
from perf.clock import Clock
from perf.contenders import CONTENDERS, Contender
from perf.memory import Memory
from perf.optimizers import RULES
from perf.race import Race
from perf.report import Report

from .racing import CPU, EAGER, race


@pytest.fixture(scope="module")
def memory():
    return Memory(CPU)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", RULES)
def test_implementations_agree(optimizer, dtype, patchy, memory):
    rows = race(memory, optimizer, EAGER, "patchy", dtype, rounds=2)
    assert {row.status for row in rows.values()} <= {"ok", "none"}, [row.reason for row in rows.values()]
    assert sum(row.status == "ok" for row in rows.values()) >= 2


def test_compiled_steps_agree(patchy, memory):
    assert race(memory, "AdamW", ["ours"], "patchy")["ours"].status == "ok"


class Recorder(torch.optim.AdamW):
    """Records which parameters have gradients in each step."""

    seen: list[list[bool]]

    def step(self, closure=None):
        self.seen.append([p.grad is not None for group in self.param_groups for p in group["params"]])
        return super().step(closure)


def contender(cls):
    return Contender(lambda rule, groups: cls(groups, **rule.options), lambda rule: True)


def test_all_contenders_get_the_same_groups_and_gradients(patchy, memory, monkeypatch):
    classes = [type(f"Recorder{i}", (Recorder,), {"seen": []}) for i in range(2)]
    for cls in classes:
        monkeypatch.setitem(CONTENDERS, cls.__name__, contender(cls))
    rows = race(memory, "AdamW", [cls.__name__ for cls in classes], "patchy", rounds=3)
    steps = patchy.untimed + 3 + 3  # memory, two warm steps, three rounds
    assert [row.status for row in rows.values()] == ["ok", "ok"]
    assert classes[0].seen == classes[1].seen == [patchy.with_gradients(step) for step in range(1, 1 + steps)]


def test_only_the_step_is_timed(patchy, memory, monkeypatch):
    timing = False

    class Watch(Clock):
        def time(self, call):
            nonlocal timing
            timing = True
            try:
                return super().time(call)
            finally:
                timing = False

    given = []
    give = Race.give_gradients
    monkeypatch.setattr(perf.race, "Clock", Watch)
    monkeypatch.setattr(Race, "give_gradients", lambda *a: (given.append(timing), give(*a)))
    race(memory, "AdamW", ["torch loop"], "patchy")
    assert given == [False] * (patchy.untimed + 3 + 3)


class OneGroup(torch.optim.AdamW):
    """Steps the first group only."""

    def step(self, closure=None):
        self.param_groups, groups = self.param_groups[:1], self.param_groups
        super().step(closure)
        self.param_groups = groups


class DecaysAll(torch.optim.AdamW):
    """Applies weight decay also where there is no gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(1 - (param.grad is None) * group["lr"] * group["weight_decay"])


class OneCount(torch.optim.AdamW):
    """Keeps one step count for all parameters."""

    steps = 0

    def step(self, closure=None):
        for state in self.state.values():
            state["step"].fill_(self.steps)
        self.steps += 1
        super().step(closure)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (OneGroup, "computes something else"),
        (DecaysAll, "changed parameters that have no gradient"),
        (OneCount, "computes something else"),
    ],
)
def test_wrong_groups_gradients_and_step_counts_are_errors(cls, reason, patchy, memory, monkeypatch):
    monkeypatch.setitem(CONTENDERS, "suspect", contender(cls))
    rows = race(memory, "AdamW", ["suspect", "torch loop"], "patchy")
    assert (rows["suspect"].status, rows["suspect"].reason[: len(reason)]) == ("error", reason)
    assert rows["torch loop"].status == "ok"


def test_the_limit_counts_the_parameters_that_are_stepped(patchy, memory):
    (row,) = race(memory, "AdamW", ["torch loop"], "patchy").values()
    row.in_cache = False
    report = Report({}, "", "", bytes_per_second=28.0 * row.parameters, rows=[row])
    assert report.limit(row) == pytest.approx(0.5)
