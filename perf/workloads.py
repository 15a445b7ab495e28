"""Models as shapes of parameters, parameter groups and the gradients of each step. Nothing is downloaded."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Shapes = list[tuple[int, ...]]
T = TypeVar("T")

CHECKED_STEPS = 2
"""The number of steps before the timing, which are compared with the reference, if a workload does not ask for more."""

CYCLE = 1024
"""The number of steps after which the subsets of gradients repeat.

A race has fewer steps, so that no contender gains by keeping what it computed for a subset.
"""


@dataclass(frozen=True)
class Workload:
    """The parameters of a model and the gradients of each step.

    The tensors are divided into ``groups`` parameter groups of about equal length. In each step a random share
    ``present`` of the tensors has gradients, the same for all contenders. The first ``untimed`` steps are checked
    against the reference and not timed.
    """

    title: str
    shapes: Shapes
    groups: int = 1
    present: float = 1.0
    untimed: int = CHECKED_STEPS

    def with_gradients(self, step: int) -> list[bool]:
        """Return for each tensor whether it has a gradient in a step."""
        count = len(self.shapes)
        if self.present == 1:
            return [True] * count
        chosen = set(random.Random(step % CYCLE).sample(range(count), round(self.present * count)))
        return [place in chosen for place in range(count)]

    def grouped(self, tensors: Sequence[T]) -> list[list[T]]:
        """Return the tensors divided into the parameter groups."""
        bounds = [len(tensors) * group // self.groups for group in range(self.groups + 1)]
        return [list(tensors[begin:end]) for begin, end in itertools.pairwise(bounds)]

    @property
    def about(self) -> str:
        """The groups and the gradients in words, or an empty string if there is nothing special."""
        parts = [f"{self.groups} groups"] if self.groups > 1 else []
        if self.present < 1:
            parts.append(f"a random {self.present:.0%} have gradients, after {self.untimed} steps")
        return ", ".join(parts)


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


TWO_HUNDRED: Shapes = [(1000,)] * 200

WORKLOADS: dict[str, Workload] = {
    "tiny_mlp": Workload("tiny MLP", tiny_mlp()),
    "policy": Workload("RL policy", policy()),
    "thousand_tensors": Workload("1,000 small tensors", thousand_tensors()),
    "random_half": Workload("random half of 200", TWO_HUNDRED, present=0.5, untimed=600),
    "many_groups": Workload("200 groups", TWO_HUNDRED, groups=200),
    "resnet50": Workload("ResNet-50", resnet50()),
    "vit_b16": Workload("ViT-B/16", vit_b16()),
    "bert_base": Workload("BERT-base", bert_base()),
    "gpt2_small": Workload("GPT-2 small", gpt2_small()),
    "llama_1b_shard": Workload("Llama 1B, 1/8", llama_1b_shard()),
}


def elements(shapes: Shapes) -> int:
    """Return the total number of elements."""
    return sum(map(math.prod, shapes))
