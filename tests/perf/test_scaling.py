"""Thread scaling: each contender steps with each number of threads, and the number is restored."""

from __future__ import annotations

import json

import pytest
import torch

import perf.race
import perf.run
from perf.__main__ import main
from perf.clock import Clock
from perf.contenders import CONTENDERS, Contender
from perf.memory import Memory
from perf.race import Length
from perf.report import BadInput, Spread
from perf.run import Request
from perf.scaling import Scaling, thread_counts

from .racing import CPU

ONES = Spread(1.0, 1.0, 1.0)
ALONE = ["--no-races", "--no-compile-cost", "--no-memory", "--rounds", "2", "--thread-scaling", "small"]


@pytest.fixture(scope="module")
def memory():
    return Memory(CPU)


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("most", "counts"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])]
)
def test_numbers_of_threads(most, counts):
    assert thread_counts(most) == counts


def scaled(memory, rounds=2):
    scaling = Scaling("small", memory, Length(rounds))
    scaling.run(lambda what, fraction: None)
    return scaling


class Ideal(Clock):
    """A clock on which the time is 6 s divided by the threads, twice that for torch, and more after a change."""

    threads = 0

    def time(self, call):
        call()
        changed, self.threads = self.threads != torch.get_num_threads(), torch.get_num_threads()
        factor = 2 if isinstance(call.__self__, torch.optim.AdamW) else 1
        return 100.0 if changed else 6.0 / self.threads * factor


def test_times_and_ratios_of_each_number_of_threads(small, memory, three_threads, monkeypatch):
    monkeypatch.setattr(perf.race, "Clock", Ideal)
    scaling = scaled(memory)
    rows = {(row.contender, row.threads): row for row in scaling.rows()}
    assert list(rows) == [(name, count) for name in ("ours", "torch fused") for count in (1, 2, 3)]
    assert scaling.errors() == []
    assert torch.get_num_threads() == 3
    for (name, count), row in rows.items():
        seconds, share = 6.0 / count * (2 if name == "torch fused" else 1), 1 / count
        assert (row.workload, row.optimizer, row.rounds, row.baseline) == ("small", "AdamW", 2, "torch fused")
        assert row.time == Spread(seconds, seconds, seconds)
        assert row.to_one_thread == Spread(share, share, share)
        assert row.ratio == (ONES if name == "torch fused" else Spread(0.5, 0.5, 0.5))


def test_an_interruption_restores_the_threads_and_keeps_the_times(small, memory, three_threads, monkeypatch):
    class Interrupted(Clock):
        calls = 0

        def time(self, call):
            self.calls += 1
            if self.calls == 2 * 2 + 2 * 3 * 2 + 5:  # warm steps of two contenders, a round, a part of the second
                torch.set_num_threads(2)
                raise KeyboardInterrupt
            return super().time(call)

    monkeypatch.setattr(perf.race, "Clock", Interrupted)
    scaling = Scaling("small", memory, Length(3))
    with pytest.raises(KeyboardInterrupt):
        scaling.run(lambda what, fraction: None)
    assert torch.get_num_threads() == 3
    assert sorted(row.rounds for row in scaling.rows()) == [1, 1, 1, 1, 2, 2]
    assert scaling.race.lanes == {}


class FailsLate(torch.optim.AdamW):
    """Fails in the second round, when there are times of the first."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps > 5 + 3 * 2:  # before the first round, and in it
            raise ValueError("too many")
        return super().step(closure)


def test_a_contender_that_fails_is_told_and_has_no_rows(small, three_threads, monkeypatch, tmp_path, capsys):
    failing = Contender(lambda rule, groups: FailsLate(groups, **rule.options), lambda rule: True)
    monkeypatch.setitem(CONTENDERS, "ours", failing)
    path = tmp_path / "a.json"
    assert main([*ALONE, "--json", str(path)]) == 0
    assert {row["contender"] for row in json.loads(path.read_text())["scaling"]} == {"torch fused"}
    assert "thread scaling of small: ours: ValueError: too many" in capsys.readouterr().out


def test_it_can_be_selected_and_measured_alone(small, three_threads, tmp_path, capsys):
    path = tmp_path / "a.json"
    assert main([*ALONE, "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    assert content["rows"] == content["first_steps"] == []
    assert [row["threads"] for row in content["scaling"]] == [1, 2, 3] * 2
    assert "Thread scaling: a step with each number of threads" in capsys.readouterr().out


def request_for(device="cpu", scaling=None, races=True):
    return Request.of(
        [], [], [], [], device, None, scaling=scaling, races=races, storages=False, compile_cost=True, memory=[]
    )


def test_it_is_for_the_cpu_and_one_workload_by_default(monkeypatch):
    assert request_for().scaling == ["resnet50"]
    assert request_for(scaling=[]).scaling == []
    assert request_for(races=False).cases == []
    with pytest.raises(BadInput, match="unknown workload 'resnet51'"):
        request_for(scaling=["resnet51"])
    monkeypatch.setattr(perf.run, "usable", torch.device)
    assert request_for("cuda").scaling == []
    with pytest.raises(BadInput, match="--thread-scaling measures the CPU, not 'cuda'"):
        request_for("cuda", ["resnet50"])
