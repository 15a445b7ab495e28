"""Optimizers that torch.optim does not have, implemented with ``torch._foreach_*`` as baselines."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor


class _Foreach(torch.optim.Optimizer):
    """Step each parameter group with lists of the parameters that have gradients, of their gradients and states."""

    states: ClassVar[dict[str, float]]
    """The names of the states and their first values."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Run one step."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            for param in params:
                if not self.state[param]:
                    self.state[param] = {name: torch.full_like(param, value) for name, value in self.states.items()}
            states = ([self.state[param][name] for param in params] for name in self.states)
            self.update(group, params, [param.grad for param in params], *states)

    def update(self, group: dict[str, Any], params: list[Tensor], grads: Any, *states: list[Tensor]) -> None:
        """Update the parameters and states of a group in place."""
        raise NotImplementedError


class ForeachLamb(_Foreach):
    """LAMB. With ``trust=False`` and ``clip`` it is BertAdam, which clips each group by its own norm."""

    states: ClassVar = {"m": 0.0, "v": 0.0}

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        trust: bool = True,
        clip: float | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "trust": trust, "clip": clip}
        super().__init__(params, defaults)

    def update(self, group: dict[str, Any], params: list[Tensor], grads: Any, *states: list[Tensor]) -> None:
        """Update the parameters and states of a group in place."""
        (m, v), (beta1, beta2) = states, group["betas"]
        if group["clip"] is not None:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
            grads = torch._foreach_mul(grads, (group["clip"] / (norm + 1e-6)).clamp(max=1.0))
        torch._foreach_lerp_(m, grads, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
        denominator = torch._foreach_sqrt(v)
        torch._foreach_add_(denominator, group["eps"])
        update: Any = torch._foreach_div(m, denominator)
        torch._foreach_add_(update, params, alpha=group["weight_decay"])
        if group["trust"]:
            weights = torch.stack(torch._foreach_norm(params)).clamp(max=10.0)
            lengths = torch.stack(torch._foreach_norm(update))
            ratio = torch.where((weights > 0) & (lengths > 0), weights / lengths, torch.ones_like(weights))
            torch._foreach_mul_(update, list(ratio.unbind()))
        torch._foreach_add_(params, update, alpha=-group["lr"])


class ForeachRMSpropTF(_Foreach):
    """RMSprop of TensorFlow, without momentum: the average starts at one, and epsilon is inside the square root."""

    states: ClassVar = {"squares": 1.0}

    def __init__(self, params: Any, lr: float = 1e-2, alpha: float = 0.9, eps: float = 1e-10) -> None:
        super().__init__(params, {"lr": lr, "alpha": alpha, "eps": eps})

    def update(self, group: dict[str, Any], params: list[Tensor], grads: Any, *states: list[Tensor]) -> None:
        """Update the parameters and states of a group in place."""
        (squares,) = states
        torch._foreach_lerp_(squares, torch._foreach_mul(grads, grads), 1 - group["alpha"])
        denominator = torch._foreach_add(squares, group["eps"])
        torch._foreach_sqrt_(denominator)
        torch._foreach_addcdiv_(params, grads, denominator, value=-group["lr"])
