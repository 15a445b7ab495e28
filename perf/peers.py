"""Optimizers that torch.optim does not have, implemented with ``torch._foreach_*`` as baselines."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ForeachLamb(torch.optim.Optimizer):
    """LAMB. With ``trust=False`` and ``clip`` it is BertAdam."""

    def __init__(
        self,
        params: list[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        trust: bool = True,
        clip: float | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "trust": trust, "clip": clip}
        super().__init__(params, defaults)
        self.m = [torch.zeros_like(param) for param in params]
        self.v = [torch.zeros_like(param) for param in params]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Run one step. There is only one parameter group."""
        group = self.param_groups[0]
        params, (beta1, beta2) = group["params"], group["betas"]
        grads: Any = [param.grad for param in params]
        if group["clip"] is not None:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
            grads = torch._foreach_mul(grads, (group["clip"] / (norm + 1e-6)).clamp(max=1.0))
        torch._foreach_lerp_(self.m, grads, 1 - beta1)
        torch._foreach_mul_(self.v, beta2)
        torch._foreach_addcmul_(self.v, grads, grads, 1 - beta2)
        denominator = torch._foreach_sqrt(self.v)
        torch._foreach_add_(denominator, group["eps"])
        update: Any = torch._foreach_div(self.m, denominator)
        torch._foreach_add_(update, params, alpha=group["weight_decay"])
        if group["trust"]:
            weights = torch.stack(torch._foreach_norm(params)).clamp(max=10.0)
            lengths = torch.stack(torch._foreach_norm(update))
            ratio = torch.where((weights > 0) & (lengths > 0), weights / lengths, torch.ones_like(weights))
            torch._foreach_mul_(update, list(ratio.unbind()))
        torch._foreach_add_(params, update, alpha=-group["lr"])


class ForeachRMSpropTF(torch.optim.Optimizer):
    """RMSprop of TensorFlow, without momentum: the average starts at one, and epsilon is inside the square root."""

    def __init__(self, params: list[Tensor], lr: float = 1e-2, alpha: float = 0.9, eps: float = 1e-10) -> None:
        super().__init__(params, {"lr": lr, "alpha": alpha, "eps": eps})
        self.squares = [torch.ones_like(param) for param in params]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Run one step. There is only one parameter group."""
        group = self.param_groups[0]
        grads: Any = [param.grad for param in group["params"]]
        torch._foreach_lerp_(self.squares, torch._foreach_mul(grads, grads), 1 - group["alpha"])
        denominator = torch._foreach_add(self.squares, group["eps"])
        torch._foreach_sqrt_(denominator)
        torch._foreach_addcdiv_(group["params"], grads, denominator, value=-group["lr"])
