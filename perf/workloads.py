"""Models as lists of parameter shapes. Nothing is downloaded."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

Shapes = list[tuple[int, ...]]


def tiny_mlp() -> Shapes:
    """Return 20 tensors: ten linear layers of 64×64."""
    return [(64, 64), (64,)] * 10


def policy() -> Shapes:
    """Return the 12 tensors of an RL policy: the convolutional actor-critic commonly used for Atari."""
    layers: Shapes = [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136), (6, 512), (1, 512)]
    return [shape for weight in layers for shape in (weight, weight[:1])]


def thousand_tensors() -> Shapes:
    """Return 1,000 vectors of 100 to 5,000 elements, with 50 different lengths."""
    choose = random.Random(0)
    lengths = [choose.randint(100, 5000) for _ in range(50)]
    return [(choose.choice(lengths),) for _ in range(1000)]


def resnet50() -> Shapes:
    """Return the 161 tensors of ResNet-50."""
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


def vit_b16() -> Shapes:
    """Return the 152 tensors of ViT-B/16 for 1,000 classes."""
    d = 768
    layer: Shapes = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(1, 1, d), (d, 3, 16, 16), (d,), (1, 197, d), *layer * 12, (d,), (d,), (1000, d), (1000,)]


def bert_base() -> Shapes:
    """Return the 199 tensors of BERT-base, uncased, with the pooler and without a head."""
    d = 768
    attention: Shapes = [(d, d), (d,)] * 4
    layer: Shapes = [*attention, (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,), (d,), (d,)]
    return [(30522, d), (512, d), (2, d), (d,), (d,), *layer * 12, (d, d), (d,)]


def gpt2_small() -> Shapes:
    """Return the 148 tensors of GPT-2 small."""
    d = 768
    layer: Shapes = [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    return [(50257, d), (1024, d), *layer * 12, (d,), (d,)]


def llama_1b_shard() -> Shapes:
    """Return the shard of one of 8 ranks of a Llama-like model with 1.24 billion parameters, sharded along dim 0."""
    d, kv, hidden = 2048, 512, 8192
    layer: Shapes = [(d, d), (kv, d), (kv, d), (d, d), (hidden, d), (hidden, d), (d, hidden), (d,), (d,)]
    return [(rows // 8, *rest) for rows, *rest in [(128256, d), *layer * 16, (d,)]]


WORKLOADS: dict[str, Callable[[], Shapes]] = {
    f.__name__: f
    for f in (tiny_mlp, policy, thousand_tensors, resnet50, vit_b16, bert_base, gpt2_small, llama_1b_shard)
}

TITLES = {
    "tiny_mlp": "tiny MLP",
    "policy": "RL policy",
    "thousand_tensors": "1,000 small tensors",
    "resnet50": "ResNet-50",
    "vit_b16": "ViT-B/16",
    "bert_base": "BERT-base",
    "gpt2_small": "GPT-2 small",
    "llama_1b_shard": "Llama 1B, 1/8",
}


def elements(shapes: Shapes) -> int:
    """Return the total number of elements."""
    return sum(map(math.prod, shapes))
