"""Fixtures that the tests of the perf report share."""

from __future__ import annotations

import pytest

import perf.contenders
from perf.workloads import TITLES, WORKLOADS


@pytest.fixture
def small(monkeypatch):
    """A workload of the shapes that rules treat differently."""
    monkeypatch.setitem(WORKLOADS, "small", lambda: [(16, 8), (8,), (4, 3, 3, 3), (1,)])
    monkeypatch.setitem(TITLES, "small", "small")


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(perf.contenders.importlib.util, "find_spec", lambda name: None)
