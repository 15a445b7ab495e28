"""The tasks of the convergence runs: a small GPT on the sources of the standard library, and a convolutional network.

Nothing is downloaded. The text is that of the Python which runs this. The images are letters in the fonts that
matplotlib brings along, moved, scaled, turned and covered with noise.
"""

from __future__ import annotations

import string
import sysconfig
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

FEWEST, MOST = 2_000, 200_000
HELD_OUT = 10
"""One file in this many is for evaluation only."""


class Task(ABC):
    """A model, batches for training, and batches that all runs are evaluated on."""

    title: str
    unit: str
    classes: int
    lr: float
    steps: int

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new model."""

    @abstractmethod
    def batch(self, generator: torch.Generator, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """Return inputs and targets."""


@cache
def corpus(held_out: bool) -> Tensor:
    """Return the bytes of the sources of the standard library, as one tensor."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(folder.glob("*.py")) if FEWEST < path.stat().st_size < MOST]
    chosen = [path for place, path in enumerate(files) if (place % HELD_OUT == 0) == held_out]
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in chosen)), dtype=torch.uint8)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for each position."""
        count, length, width = x.shape
        query, key, value = self.qkv(x).view(count, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(count, length, width))
        return result


class Block(nn.Module):
    """A transformer block with normalisation before each part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(width, heads), nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for each position."""
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class GPT(nn.Module):
    """A decoder over bytes."""

    def __init__(self, length: int, width: int = 96, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(Text.classes, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, Text.classes, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.06)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of the next byte after each position, with the classes in dimension 1."""
        x = self.tokens(text) + self.places.weight[: text.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits.transpose(1, 2)


class Text(Task):
    """Predict the next byte of Python sources."""

    title, unit = "GPT on the sources of the standard library", "nats a byte"
    classes = 256
    lr, steps, size, length = 1e-3, 700, 16, 64

    def model(self) -> nn.Module:
        """Return a GPT of 0.4 million parameters."""
        return GPT(self.length)

    def batch(self, generator: torch.Generator, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """Return pieces of text, and the same moved by one byte."""
        text = corpus(held_out)
        starts = torch.randint(len(text) - self.length, (self.size,), generator=generator)
        pieces = text[starts.unsqueeze(1) + torch.arange(self.length + 1)].long()
        return pieces[:, :-1], pieces[:, 1:]


SIDE = 20
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSerif", "DejaVuSerif-Italic", "DejaVuSerif-Bold")


@cache
def letters() -> tuple[Tensor, Tensor]:
    """Return pictures of the letters in each font, and their numbers."""
    import matplotlib
    import numpy
    from PIL import Image, ImageDraw, ImageFont

    pictures, classes = [], []
    for font in FONTS:
        drawn = ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{font}.ttf", 15)
        for number, letter in enumerate(string.ascii_lowercase):
            image = Image.new("L", (SIDE, SIDE))
            ImageDraw.Draw(image).text((SIDE / 2, SIDE / 2 + 5), letter, 255, drawn, anchor="ms")
            pictures.append(torch.from_numpy(numpy.array(image, dtype=numpy.float32) / 255))
            classes.append(number)
    return torch.stack(pictures).unsqueeze(1), torch.tensor(classes)


class Letters(Task):
    """Recognise letters."""

    title, unit = "convolutional network on distorted letters", "nats an image"
    classes = len(string.ascii_lowercase)
    lr, steps, size = 1e-3, 1000, 64

    def model(self) -> nn.Module:
        """Return a network of three convolutions with normalisation."""
        layers: list[nn.Module] = []
        for inner, outer in ((1, 24), (24, 48), (48, 64)):
            layers += [nn.Conv2d(inner, outer, 3, 2, 1, bias=False), nn.GroupNorm(8, outer), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 9, self.classes))

    def batch(self, generator: torch.Generator, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """Return letters that are moved, scaled, turned and noisy."""
        pictures, classes = letters()
        chosen = torch.randint(len(pictures), (self.size,), generator=generator)
        turn, scale, x, y = torch.rand(4, self.size, generator=generator) * 2 - 1
        turn, scale = 0.3 * turn, torch.exp(0.2 * scale)
        rows = [torch.stack([scale * turn.cos(), -scale * turn.sin(), 0.2 * x], 1)]
        rows += [torch.stack([scale * turn.sin(), scale * turn.cos(), 0.2 * y], 1)]
        grid = functional.affine_grid(torch.stack(rows, 1), [self.size, 1, SIDE, SIDE], align_corners=False)
        images = functional.grid_sample(pictures[chosen], grid, align_corners=False)
        return images + 0.3 * torch.randn(images.shape, generator=generator), classes[chosen]


TASKS: dict[str, Task] = {"text": Text(), "letters": Letters()}
