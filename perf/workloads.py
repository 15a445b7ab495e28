"""Models as lists of parameter shapes, so that nothing has to be downloaded."""

from __future__ import annotations

import random

Shapes = list[tuple[int, ...]]


def tiny_mlp() -> Shapes:
    """Twenty tensors: ten layers of 64×64."""
    return [(64, 64), (64,)] * 10


def thousand_tensors() -> Shapes:
    """A thousand vectors of 100 to 5,000 elements, of 50 different lengths."""
    choose = random.Random(0)
    lengths = [choose.randint(100, 5000) for _ in range(50)]
    return [(choose.choice(lengths),) for _ in range(1000)]


def resnet50() -> Shapes:
    """The 161 tensors of ResNet-50."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            outputs = 4 * width
            for a, b, k in ((inputs, width, 1), (width, width, 3), (width, outputs, 1)):
                shapes += [(b, a, k, k), (b,), (b,)]
            if block == 0:
                shapes += [(outputs, inputs, 1, 1), (outputs,), (outputs,)]
            inputs = outputs
    return [*shapes, (1000, 2048), (1000,)]


def gpt2_small() -> Shapes:
    """The 148 tensors of GPT-2 small."""
    d = 768
    layer: Shapes = [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    return [(50257, d), (1024, d), *layer * 12, (d,), (d,)]


WORKLOADS = {f.__name__: f for f in (tiny_mlp, thousand_tensors, resnet50, gpt2_small)}
