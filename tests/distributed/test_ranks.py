"""Sharded and replicated training on several ranks gives the same result as training in one process.

Two ranks and four ranks are started once each and run all their cases. The tests check the results.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from . import cases
from .world import run

Answers = dict[str, list[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def on_two(folder) -> Answers:
    return run(cases.TWO, 2, folder)


@pytest.fixture(scope="module")
def on_four(folder, on_two) -> Answers:
    """Run after the two ranks, to load the units that those compiled."""
    return run(cases.FOUR, 4, folder)


@pytest.fixture(scope="module")
def reloaded(folder, on_four, tmp_path_factory) -> Answers:
    """Two ranks load the checkpoints that four ranks saved."""
    assert all(answer is None for name, each in on_four.items() if name.startswith("save") for answer in each)
    (later := folder / "later").mkdir()
    for path in folder.glob("checkpoint-*"):
        (later / path.name).symlink_to(path)
    return run(cases.RELOADED, 2, later)


def of(answers: Answers, case: str) -> list[Any]:
    """Return the results of a case, one for each rank; raise the error if a rank raised one."""
    for answer in answers[case]:
        if isinstance(answer, BaseException):
            raise answer
    return answers[case]


@pytest.mark.parametrize("name", cases.SHARDED)
def test_fsdp_on_two_ranks_equals_one_process(on_two, name):
    for answer in of(on_two, f"fsdp {name}"):
        assert answer["distance"] <= (2e-6 if name == "Adafactor" else 1e-6)  # its means are sums over ranks
        assert answer["moved"] > 1e-2
        assert answer["mode"] == "compiled"
        assert answer["recompiles"] == 0
        assert answer["events"] == ()
    assert any(answer["empty"] for answer in on_two[f"fsdp {name}"]), "some rank should have an empty shard"


@pytest.mark.parametrize("name", ["AdamW", *cases.BY_TENSOR])
def test_fsdp_on_four_ranks_equals_one_process(on_four, name):
    # four ranks sum gradients in another order than one process, as in test_replicated_and_sharded
    assert max(answer["distance"] for answer in of(on_four, f"fsdp {name}")) <= 2e-6


@pytest.mark.parametrize("name", cases.SHARDED)
def test_shards_on_two_ranks_follow_the_formula(on_two, name):
    assert max(of(on_two, f"formula {name}")) <= 2e-6


@pytest.mark.parametrize("name", cases.SUMS)
def test_shards_on_four_ranks_follow_the_formula(on_four, name):
    assert max(of(on_four, f"formula {name}")) <= 2e-6


@pytest.mark.parametrize("name", ["AdamW", "Lamb"])
def test_replicated_and_sharded(on_four, name):
    assert max(of(on_four, f"hybrid {name}")) <= 2e-6  # gradients are summed in another order


@pytest.mark.parametrize("name", ["AdamP", "BertAdam"])
def test_norms_count_replicas_once(on_four, name):
    assert max(of(on_four, f"hybrid shards {name}")) <= 2e-6


@pytest.mark.parametrize("name", ["AdamW", *cases.BY_TENSOR])
def test_replicas_stay_equal(on_two, name):
    first, second = of(on_two, f"ddp {name}")
    assert first["distance"] <= 1e-6
    assert first["events"] == ()
    assert all(torch.equal(a, b) for a, b in zip(first["params"], second["params"], strict=True))


def test_clipping_is_by_the_norm_of_all_shards(on_two):
    for answer in of(on_two, "clipped"):
        assert answer["distance"] <= 1e-6
        assert answer["norm"] == pytest.approx(1.0, rel=1e-5)


def test_an_overflow_on_one_rank_is_one_on_all(on_two):
    for answer in of(on_two, "scaled"):
        assert answer["distance"] <= 2e-6
        assert answer["scale"] == 128.0


@pytest.mark.parametrize("name", ["AdamW", "Lamb"])
def test_shards_are_stepped_during_backward(on_two, name):
    for answer in of(on_two, f"in backward {name}"):
        assert answer["distance"] <= 1e-6
        assert answer["freed"]
        assert answer["events"] == ()


def test_ddp_is_refused_during_backward(on_two):
    for message in of(on_two, "in_backward_of_ddp"):
        assert "cannot step the parameters of DistributedDataParallel" in message


def test_averages_of_shards(on_two):
    for answer in of(on_two, "averages"):
        assert answer["inside"] <= 2e-6
        assert answer["saved"] <= 2e-6
        assert answer["restored"] == 0.0


def test_zero_redundancy_optimizer(on_two):
    assert max(of(on_two, "zero_redundancy")) <= 1e-6


def test_tensors_cut_by_columns_and_partial_gradients(on_two):
    assert max(of(on_two, "columns")) <= 1e-6


@pytest.mark.parametrize(("ranks", "case"), [(2, "rows"), (2, "columns"), (2, "in stacks"), (4, "both"), (4, "twice")])
def test_means_over_matrices_that_are_split(on_two, on_four, ranks, case):
    """Replicated states, such as those of columns if rows are split, are the same on a rank with an empty shard."""
    for answer in of({2: on_two, 4: on_four}[ranks], f"matrices {case}"):
        assert max(answer.values()) <= 1e-12


@pytest.mark.parametrize("name", cases.CAUTIOUS)
def test_masks_of_shards_are_those_of_the_whole_step(on_two, name):
    assert max(of(on_two, f"cautious {name}")) <= 1e-12


@pytest.mark.parametrize("name", cases.SAVED)
def test_a_checkpoint_of_four_ranks_goes_on_with_two(reloaded, name):
    for answer in of(reloaded, f"load {name}"):
        assert answer["distance"] <= 2e-6
        assert answer["steps"] == (set() if name == "SGD" else {cases.STEPS // 2})
        assert answer["kinds"] == {"DTensor"}


@pytest.mark.parametrize("label", cases.STORED)
def test_other_storages_of_shards_give_the_bits_of_one_process(on_two, label):
    for answer in of(on_two, f"stored {label}"):
        assert answer["equal"]
        kept = {"8-bit": "torch.uint8", "kahan": "torch.bfloat16", "master weights": "torch.float32"}[label]
        assert answer["dtypes"]["exp_avg"] == kept


def test_all_ranks_decide_alike_what_is_kept_in_8_bits(on_two):
    first, second = of(on_two, "uneven")
    assert first == second
    assert first["dtypes"] == [torch.float32] * 3
    assert first["norm"] == pytest.approx(first["expected"], rel=1e-5)


@pytest.mark.parametrize("label", cases.STORED)
def test_other_storages_go_on_with_another_number_of_ranks(reloaded, label):
    assert all(of(reloaded, f"load stored {label}"))


def test_what_cannot_be_stepped_by_shards_is_refused_by_name(on_two):
    for answers in of(on_two, "refusals"):
        assert all("parameter 'weight'" in answer or "'weight'" in answer for answer in answers.values())
        assert "shard the parameter along dimension 0" in answers["rows cut"]
        assert "compute means by an argument mean_over of update()" in answers["matrices cut"]
        assert "redistribute it to Shard or Replicate first" in answers["partial"]
        assert "pass the sums to all_reduce(...)" in answers["no all_reduce"]
        assert "pass the sums to all_reduce(...)" in answers["no all_reduce, by rows"]
        assert "set_optimizer_state_dict" in answers["state not split"]
        assert "set_optimizer_state_dict" in answers["state split otherwise"]


def test_a_rule_by_rows_needs_no_all_reduce(on_two):
    for answer in of(on_two, "rows"):
        assert answer == pytest.approx([-0.1] * 4)


def test_parameters_swapped_temporarily_by_fsdp_are_no_event(on_two):
    for answer in of(on_two, "watched"):
        assert answer["quiet"] == ()
        assert answer["same plan"]
        assert answer["kept"]
        (event,) = answer["moved"]
        assert "storage changed" in event
