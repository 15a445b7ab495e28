"""Events are logged once, in one line for all parameters of a step, and their number is bounded."""

from __future__ import annotations

import logging

import pytest
import torch

import compiled_optim as co
from compiled_optim.guard import event_log


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_many_parameters_are_one_line(caplog):
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    optimizer = co.AdamW(model, compile=False)
    model.double()
    with caplog.at_level(logging.WARNING, logger="compiled_optim"):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    (line,) = lines(caplog)
    assert line.startswith("AdamW follows 8 reallocated parameters: parameter '0.weight': dtype changed from ")
    assert line.endswith("; and 5 more, see explain()")
    assert len(optimizer.explain().events) == 8


CHANGES = {
    "replaced": lambda layer: setattr(layer, "weight", torch.nn.Parameter(torch.ones(2, 2))),
    "removed": lambda layer: setattr(layer, "weight", None),
    "moved": lambda layer: setattr(layer.weight, "data", layer.weight.data.clone()),
    "added": lambda layer: setattr(layer, "scale", torch.nn.Parameter(torch.ones(1))),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_many_changes_are_one_line(kind, caplog):
    model = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(6))
    optimizer = co.AdamW(model, compile=False)
    for layer in model:
        CHANGES[kind](layer)
    for _ in range(2):
        optimizer.step()
    (line,) = lines(caplog)
    start = "does not step 6 new parameters, pass them to add_param_group()"
    assert line.startswith(f"AdamW {start if kind == 'added' else 'follows 6 reallocated parameters'}: parameter '0.")
    assert line.endswith("; and 3 more, see explain()")
    assert len(optimizer.explain().events) == 6


def test_renamed_parameters_are_no_event(caplog):
    model = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(6))
    optimizer = co.AdamW(model, compile=False)
    model.insert(0, torch.nn.Identity())
    optimizer.step()
    assert lines(caplog) == []
    assert optimizer.explain().events == ()


def test_3000_shapes(caplog):
    """Only the first 1,000 events are kept and logged."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = co.SGD([weight], compile=False)
    for size in range(2, 3002):
        weight.data = torch.ones(size)
        optimizer.step()
    events = optimizer.explain().events
    assert len(events) == 1001
    assert events[-1] == "... and 2000 further events that are not kept"
    assert len(lines(caplog)) == 1000
    log = optimizer._stepper._events
    assert len(log._counts) == len(log._texts) == 1000


def test_a_line_counts_the_events_that_are_not_kept(monkeypatch, caplog):
    monkeypatch.setattr(event_log, "MAX_EVENTS", 3)
    model = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(4))
    optimizer = co.AdamW(model, compile=False)
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        optimizer.step()
    (line,) = lines(caplog)
    assert line.startswith("AdamW follows 8 reallocated parameters: ")
    assert line.endswith("; and 5 more, see explain()")


def test_the_number_of_events_is_bounded(monkeypatch):
    monkeypatch.setattr(event_log, "MAX_EVENTS", 3)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = co.SGD([weight], compile=False)
    for size in range(2, 8):
        weight.data = torch.ones(size)
        weight.grad = torch.ones(size)
        optimizer.step()
    events = optimizer.explain().events
    assert len(events) == 4
    assert events[-1] == "... and 3 further events that are not kept"
