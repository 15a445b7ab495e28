"""Sizes: the parameters of each workload, and the bytes that each rule has to move for one of them."""

from __future__ import annotations

import pytest

from perf.optimizers import RULES
from perf.workloads import TITLES, WORKLOADS, elements


@pytest.mark.parametrize(
    ("workload", "tensors", "parameters"),
    [
        ("tiny_mlp", 20, 41_600),
        ("policy", 12, 1_687_719),
        ("resnet50", 161, 25_557_032),
        ("vit_b16", 152, 86_567_656),
        ("bert_base", 199, 109_482_240),
        ("gpt2_small", 148, 124_439_808),
        ("llama_1b_shard", 146, 1_235_814_400 // 8),
    ],
)
def test_workloads_have_the_published_sizes(workload, tensors, parameters):
    shapes = WORKLOADS[workload]()
    assert (len(shapes), elements(shapes)) == (tensors, parameters)
    assert workload in TITLES


@pytest.mark.parametrize(
    ("optimizer", "itemsize", "expected"),
    [
        ("AdamW", 4, 28),
        ("AdamW", 2, 14),
        ("AdamW+clip", 4, 32),
        ("SGD", 4, 20),
        ("RMSprop", 4, 20),
        ("BertAdam", 4, 32),
    ],
)
def test_bytes_that_a_rule_has_to_move(optimizer, itemsize, expected):
    assert RULES[optimizer].bytes_per_parameter(itemsize) == expected
