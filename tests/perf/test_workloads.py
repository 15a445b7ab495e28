"""The workloads: sizes, groups, gradients of each step, and the bytes that a rule has to move for a parameter."""

from __future__ import annotations

import pytest

from perf.optimizers import RULES
from perf.workloads import CYCLE, WORKLOADS, Workload, elements


@pytest.mark.parametrize(
    ("workload", "tensors", "parameters"),
    [
        ("tiny_mlp", 20, 41_600),
        ("policy", 12, 1_687_719),
        ("random_half", 200, 200_000),
        ("many_groups", 200, 200_000),
        ("resnet50", 161, 25_557_032),
        ("vit_b16", 152, 86_567_656),
        ("bert_base", 199, 109_482_240),
        ("gpt2_small", 148, 124_439_808),
        ("llama_1b_shard", 146, 1_235_814_400 // 8),
    ],
)
def test_workloads_have_the_published_sizes(workload, tensors, parameters):
    shapes = WORKLOADS[workload].shapes
    assert (len(shapes), elements(shapes)) == (tensors, parameters)


def test_a_random_half_has_gradients_and_another_one_in_each_step():
    workload = WORKLOADS["random_half"]
    steps = [workload.with_gradients(step) for step in range(1, 1 + workload.untimed)]
    assert {sum(step) for step in steps} == {100}
    assert len(set(map(tuple, steps))) == workload.untimed
    assert steps[0] == workload.with_gradients(1 + CYCLE)
    counts = {sum(tensor) for tensor in zip(*steps, strict=True)}
    assert len(counts) > 20  # the tensors have many different step counts
    assert WORKLOADS["tiny_mlp"].with_gradients(7) == [True] * 20


def test_groups():
    assert [len(group) for group in WORKLOADS["many_groups"].grouped(range(200))] == [1] * 200
    assert Workload("", [], groups=3).grouped(range(8)) == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert WORKLOADS["tiny_mlp"].grouped(range(20)) == [list(range(20))]


@pytest.mark.parametrize(
    ("workload", "about"),
    [
        ("tiny_mlp", ""),
        ("many_groups", "200 groups"),
        ("random_half", "a random 50% have gradients, after 600 steps"),
    ],
)
def test_what_is_special_is_told(workload, about):
    assert WORKLOADS[workload].about == about


def test_sgd_is_measured_with_momentum():
    assert RULES["SGD"].options["momentum"] > 0


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
