"""The expected content of one parameter of a module: its value, its states and its step count.

A step here is one step of torch.optim.AdamW on one parameter, in float32 or better, rounded to the parameter's dtype.
It knows nothing of batches, plans, addresses or guards.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

OPTIONS = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-2, "weight_decay": 0.1}
MOMENTS = ("exp_avg", "exp_avg_sq")
DTYPES = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64}
TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5, torch.float64: 1e-12}


class Place:
    """The expected content of one parameter.

    ``group`` is the number of its group; None if the optimizer does not have it. ``value`` may be a part of the value
    of another parameter, so it is changed in place where the parameter is.
    """

    def __init__(self, value: Tensor, group: int | None = None) -> None:
        self.value = value.detach().cpu().clone()
        self.group = group
        self.grad: Tensor | None = None
        self.steps = 0
        self.states: dict[str, Tensor] = {}
        self.seen = value.dtype
        self.tolerance = TOLERANCES[value.dtype]  # that of the coarsest dtype the value was ever rounded to

    def cast(self, dtype: torch.dtype) -> None:
        self.value = self.value.to(dtype)
        self.grad = None if self.grad is None else self.grad.to(dtype)
        self.tolerance = max(self.tolerance, TOLERANCES[dtype])

    def move(self) -> None:
        """Give the value memory of its own."""
        self.value = self.value.clone()

    def follow(self) -> None:
        """Cast the states to the new dtype, as the first step after the cast does."""
        self.states = {
            name: state.to(self.value.dtype) if state.dtype == self.seen else state
            for name, state in self.states.items()
        }
        self.seen = self.value.dtype

    def start_afresh(self, value: Tensor) -> None:
        self.__init__(value, self.group)

    def forget(self) -> None:
        """Drop the states."""
        self.states, self.steps = {}, 0

    def step(self, lr: float) -> None:
        if self.grad is None:
            return
        wide = torch.promote_types(self.value.dtype, torch.float32)
        param = nn.Parameter(self.value.to(wide, copy=True))
        param.grad = self.grad.to(wide)
        optimizer = torch.optim.AdamW([param], **{**OPTIONS, "lr": lr}, foreach=False)
        if self.states:
            states = {name: state.to(wide, copy=True) for name, state in self.states.items()}
            optimizer.state[param] = {"step": torch.tensor(float(self.steps)), **states}
        optimizer.step()
        dtypes = {name: state.dtype for name, state in self.states.items()}
        self.steps += 1
        self.value.copy_(param.detach())
        self.states = {
            name: optimizer.state[param][name].to(dtypes.get(name, self.value.dtype)).clone() for name in MOMENTS
        }
