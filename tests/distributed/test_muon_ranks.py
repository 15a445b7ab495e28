"""Muon on two and four ranks, which hold shards of its matrices, gives the same result as in one process."""

from __future__ import annotations

import pytest

from . import muon_cases as cases
from .test_ranks import of
from .world import run


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return {2: run(cases.TWO, 2, folder), 4: run(cases.FOUR, 4, folder)}


@pytest.mark.parametrize(("ranks", "case"), [(2, "fsdp"), (2, "clipped"), (4, "fsdp")])
def test_fsdp_equals_one_process(answers, ranks, case):
    for answer in of(answers[ranks], case):
        assert answer["distance"] <= 5e-6  # gradients are summed in another order
        assert answer["moved"] > 1e-2
        assert answer["events"] == ()
        assert answer["recompiles"] == 0
        assert answer["kinds"] == {"DTensor"}
        assert [route.split(":")[0] for route in answer["routes"]] == ["Muon", "Muon", "AdamW"]


@pytest.mark.parametrize(
    ("ranks", "case"),
    [(2, "rows"), (2, "columns"), (2, "replicated"), (4, "rows"), (4, "hybrid"), (4, "both dimensions")],
)
def test_shards_are_those_of_the_whole_step(answers, ranks, case):
    assert max(of(answers[ranks], case)) <= 1e-12


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_matrix_is_mapped_by_one_rank(answers, ranks):
    stacks = of(answers[ranks], "owners")
    assert all(stacks), "every rank has some of them"
    assert sum(map(sum, stacks)) == sum(len(shape) == 2 for shape in cases.SHAPES)
