"""Events are logged once, in one line for all parameters of a step, and their number is bounded."""

from __future__ import annotations

import logging

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
