"""Fixtures that the tests of the perf report share."""

from __future__ import annotations

import pytest

import perf.contenders
import perf.race
from perf.workloads import WORKLOADS, Workload

SMALL = [(16, 8), (8,), (4, 3, 3, 3), (1,)]


@pytest.fixture(autouse=True)
def _nobody_is_slow(monkeypatch):
    """Let every contender run in every round, also if another process has taken the processor in a warm step."""
    monkeypatch.setattr(perf.race, "SLOW_SECONDS", float("inf"))


@pytest.fixture
def small(monkeypatch):
    """A workload of the shapes that rules treat differently."""
    monkeypatch.setitem(WORKLOADS, "small", Workload("small", SMALL))


@pytest.fixture
def patchy(monkeypatch):
    """A workload of three groups, where another half of the tensors has gradients in each of many steps."""
    workload = Workload("patchy", SMALL * 3, groups=3, present=0.5, untimed=40)
    monkeypatch.setitem(WORKLOADS, "patchy", workload)
    return workload


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(perf.contenders.importlib.util, "find_spec", lambda name: None)
