"""A plain training loop: the optimizer is the only line that differs from torch.optim.

It shows clipping inside the step, a schedule that compiles nothing again, a checkpoint that torch.optim can load, and
what ``explain()`` prints.

Run it with ``python examples/plain_loop.py``. The first run compiles for some seconds; later ones load the result.
"""

from __future__ import annotations

import torch
from torch import nn

import compiled_optim as co

STEPS = 100


def main() -> None:
    """Fit a small network to a function, and continue for one step with torch.optim."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = co.AdamW(model, lr=1e-2, weight_decay=0.01, max_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)

    for step in range(STEPS):
        x = torch.randn(256, 8)
        loss = nn.functional.mse_loss(model(x).squeeze(1), x.prod(1).tanh() + x[:, 0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step:3}: loss {loss.item():.4f}, gradient norm {optimizer.last_grad_norm:.3f}")

    print(f"\n{optimizer.explain()}")
    assert optimizer.explain().recompiles == 0

    other = torch.optim.AdamW(model.parameters(), lr=1e-2)
    other.load_state_dict(optimizer.state_dict())
    x = torch.randn(256, 8)
    model(x).square().mean().backward()
    other.step()
    print("\ntorch.optim.AdamW has continued from the checkpoint")


if __name__ == "__main__":
    main()
