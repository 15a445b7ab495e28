"""Muon with routing: hidden matrices are stepped by Muon, everything else by AdamW, in one optimizer.

``co.Muon(model)`` decides by the module that a parameter belongs to: embeddings, heads, vectors and scalars go to
AdamW. ``explain()`` shows which parameter went where.

Run it with ``python examples/muon.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import compiled_optim as co


class Classifier(nn.Module):
    """Embeddings, hidden matrices and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.hidden = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.LayerNorm(32))
        self.head = nn.Linear(32, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of a row of tokens."""
        result: Tensor = self.head(self.hidden(self.embedding(tokens).mean(1)))
        return result


def main() -> None:
    """Learn which of eight classes occurs most in a row of tokens."""
    torch.manual_seed(0)
    model = Classifier()
    optimizer = co.Muon(model, lr=0.02)
    losses = []
    for _ in range(100):
        tokens = torch.randint(64, (128, 9))
        target = torch.nn.functional.one_hot(tokens // 8, 8).sum(1).argmax(1)
        loss = nn.functional.cross_entropy(model(tokens), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {len(losses)} steps")
    assert losses[-1] < losses[0]
    print(optimizer.explain())


if __name__ == "__main__":
    main()
