"""An optimizer of your own: a constructor and its formula.

AdaBelief (Zhuang et al., 2020, https://arxiv.org/abs/2010.07468) divides by the variance of the gradient around its
average, instead of its square. The class below is compiled in one pass over all tensors, is guarded, takes part in
clipping, and stores its states in 8 bits on request, without a line about any of that. docs/rules.md explains how to
write one.

Run it with ``python examples/custom_rule.py``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

import compiled_optim as co


class AdaBelief(co.Optimizer):
    """AdaBelief with decoupled weight decay."""

    nonnegative = frozenset({"exp_avg_var"})  # in 8 bits this state needs no sign

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay), **options)

    def derived(self, group: dict[str, Any], step: int) -> dict[str, float]:
        """Return the numbers of a step, computed on the host in double precision."""
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        return {
            "shrink": 1 - lr * group["weight_decay"],
            "step_size": lr / (1 - beta1**step),
            "correction": 1 / math.sqrt(1 - beta2**step),
        }

    @staticmethod
    def update(p, g, exp_avg, exp_avg_var, *, shrink, beta1, beta2, eps, step_size, correction):
        """Update all parameters and states in place."""
        p *= shrink
        exp_avg.ema_(g, beta1)  # m = b1 m + (1 - b1) g
        surprise = g - exp_avg
        exp_avg_var.ema_(surprise * surprise, beta2)  # s = b2 s + (1 - b2) (g - m)² + eps
        exp_avg_var += eps
        p -= step_size * (exp_avg / (exp_avg_var.sqrt() * correction + eps))


def main() -> None:
    """Train with the rule, and compare a compiled step with the same step made eagerly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = AdaBelief(model, lr=1e-2, max_grad_norm=1.0)
    losses = []
    for _ in range(100):
        x = torch.randn(128, 16)
        loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {len(losses)} steps")
    assert losses[-1] < 0.1 * losses[0]

    model(torch.randn(128, 16)).square().mean().backward()
    with optimizer.compare_eager() as comparison:
        optimizer.step()
    print(f"a compiled and an eager step differ by {comparison.largest:.1g}")
    assert comparison.largest < 1e-5
    print(optimizer.explain())


if __name__ == "__main__":
    main()
