"""What the tests of frameworks share: a small model, its data, and the comparison of two training runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_optim as co

OURS = co.AdamW
THEIRS = torch.optim.AdamW

# With a small epsilon, steps of Adam do not depend on the scale of the gradients, and a run that does not unscale or
# clip them would pass. They would also amplify the rounding of low precision where a gradient is near zero.
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-2}
TOLERANCE = 1e-5


@dataclass
class Run:
    """A training run: the parameters before and after it, its losses, and what the framework said after each step."""

    start: list[Tensor]
    losses: list[float] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)
    end: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, model: torch.nn.Module) -> Run:
        return cls([param.detach().clone() for param in model.parameters()])

    def finish(self, model: torch.nn.Module, optimizer: Any) -> Run:
        """Keep the parameters, and check that our optimizer was the one that stepped, and compiled."""
        self.end = [param.detach().clone() for param in model.parameters()]
        if isinstance(optimizer, co.Optimizer):
            assert optimizer.explain().mode == "compiled"
        return self


def assert_same_run(actual: Run, expected: Run) -> None:
    """Assert that two runs agree up to rounding, and that they changed each parameter by much more."""
    for param, same, start in zip(actual.end, expected.end, expected.start, strict=True):
        torch.testing.assert_close(param, same, rtol=0, atol=TOLERANCE)
        assert (same - start).abs().max() > 100 * TOLERANCE
    assert actual.losses == pytest.approx(expected.losses, rel=1e-4)
    assert actual.reports == expected.reports


def small_model() -> torch.nn.Module:
    """Return a model with the same values on every call."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1, bias=False))


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 8, generator=generator) for _ in range(count)]


def loss_of(model: torch.nn.Module, batch: Tensor) -> Tensor:
    """Return the error of learning the sum of a row."""
    return (model(batch).squeeze(1).float() - batch.sum(1)).square().mean()
