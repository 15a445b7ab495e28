"""Measurements: allocated memory, device events, load of the machine, and quartiles."""

from __future__ import annotations

import pytest
import torch

from perf import busy
from perf.clock import Clock
from perf.memory import extra_bytes
from perf.race import spread
from perf.report import Spread

from .racing import CPU


def test_extra_memory_is_what_a_step_allocates():
    one = torch.zeros(1000, 1000)
    assert extra_bytes(lambda: one.add_(1), CPU) < 100
    assert extra_bytes(lambda: (one + 1).add_(one * 2), CPU) == pytest.approx(2 * 4e6, abs=100)


def test_devices_are_timed_by_their_events(monkeypatch):
    said = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            said.append("record")

        def elapsed_time(self, other):
            return 250.0  # milliseconds

    class Module:
        synchronize = staticmethod(lambda device: said.append("synchronize"))

    Module.Event = Event
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    assert Clock(torch.device("cuda")).time(lambda: said.append("call")) == 0.25
    assert said == ["synchronize", "record", "call", "record", "synchronize"]


@pytest.mark.parametrize(("used", "share"), [(100, None), (200, "10%"), (1000, "90%")])
def test_a_busy_machine_is_told(used, share, tmp_path, monkeypatch):
    """In 10 s of CPU time this process used 1 s and others the rest of ``used``, in hundredths."""
    monkeypatch.setattr(busy, "STAT", tmp_path / "stat")
    monkeypatch.setattr(busy.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(busy.os, "times", lambda: (0.0, 0.0, 0.0, 0.0, 0.0))
    busy.STAT.write_text("cpu  0 0 0 0 0 0 0 0 0 0\n")
    others = busy.Others()
    busy.STAT.write_text(f"cpu  {used - 50} 0 20 {1000 - used} 0 0 0 30 0 0\n")
    monkeypatch.setattr(busy.os, "times", lambda: (0.5, 0.2, 0.2, 0.1, 9.0))
    note = others.note()
    assert [f"others took {share} of the CPU" in line for line in note] == ([True] if share else [])


def test_quartiles():
    assert spread([3.0]) == Spread(3.0, 3.0, 3.0)
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0)
