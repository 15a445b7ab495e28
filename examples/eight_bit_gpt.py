"""States of one byte: a small GPT, trained with AdamW in float32 and with 8-bit states, and both loss curves.

The text is the source code of Python's own standard library. The states take 2.1 bytes a parameter instead of 8, and
the curves lie on each other. ``explain()`` shows the bytes of each buffer.

Run it with ``python examples/eight_bit_gpt.py``; ``--steps 500`` trains longer. With matplotlib installed,
``--plot curve.png`` saves the curves as a picture. ``python -m perf.convergence`` is the thorough comparison.
"""

from __future__ import annotations

import argparse
import sysconfig
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

import compiled_optim as co

LENGTH, WIDTH, BATCH = 48, 64, 16


class GPT(nn.Module):
    """A decoder over bytes, made of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of the next byte after each position."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        logits: Tensor = self.head(self.layers(self.tokens(text) + self.places.weight, mask, is_causal=True))
        return logits


def corpus() -> Tensor:
    """Return some sources of the standard library as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def train(text: Tensor, steps: int, **options: object) -> tuple[list[float], co.Optimizer]:
    """Train a new GPT, always from the same weights and on the same batches."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = co.AdamW(model, lr=2e-3, **options)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1))
        piece = text[starts + torch.arange(LENGTH + 1)].long()
        loss = nn.functional.cross_entropy(model(piece[:, :-1]).flatten(0, 1), piece[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, optimizer


def averages(losses: list[float], parts: int = 10) -> list[float]:
    """Return the mean loss of each of ``parts`` parts of the run."""
    cuts = [len(losses) * part // parts for part in range(parts + 1)]
    return [sum(losses[a:b]) / (b - a) for a, b in pairwise(cuts)]


def main() -> None:
    """Train twice and print both curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    text = corpus()
    full, _ = train(text, given.steps)
    small, optimizer = train(text, given.steps, state_dtype="8bit")
    print("mean loss of each tenth of the run")
    for number, (a, b) in enumerate(zip(averages(full), averages(small), strict=True), start=1):
        print(f"{number:3}  float32 {a:.3f}  8-bit {b:.3f}  {'#' * round(12 * b)}")
    sizes = optimizer.explain().bytes_per_element
    states = sum(size for name, size in sizes.items() if name not in ("gradients", "parameters"))
    print(f"bytes of the states for each parameter: {states:.2f}, instead of 8 in float32")
    print(", ".join(f"{name} {size:.2f}" for name, size in sizes.items()))
    if given.plot is not None:
        from matplotlib.figure import Figure

        figure = Figure()
        axes = figure.subplots()
        axes.plot(full, label="float32 states")
        axes.plot(small, label="8-bit states")
        axes.set(xlabel="step", ylabel="loss, nats a byte")
        axes.legend()
        figure.savefig(given.plot)


if __name__ == "__main__":
    main()
