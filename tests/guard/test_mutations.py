"""Fuzzing of the guard: random sequences of mutations, compared after each step with the expected content."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers import run_python

from .mutations import World, moves, play

# set GUARD_FUZZ=2000 for a thorough run
SEQUENCES = int(os.environ.get("GUARD_FUZZ", "40"))
MOVES = st.lists(st.tuples(st.integers(0, len(moves(False)) - 1), st.integers(0, 11)), max_size=40)


@pytest.mark.parametrize("policy", ["recompile", "raise"])
@pytest.mark.parametrize("mode", ["compiled", "eager", "flat"])
def test_mutations(mode, policy):
    @settings(max_examples=SEQUENCES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(MOVES)
    def run(sequence):
        play(World(mode == "compiled", policy, layout="flat" if mode == "flat" else None), sequence)

    run()


ON_THE_DEVICE = """
import random, sys
from tests import npu_device
npu_device.install()
from tests.guard.mutations import World, moves, play

actions = moves(True)
for seed in range({sequences}):
    choose = random.Random(seed)
    sequence = [(choose.randrange(len(actions)), choose.randrange(12)) for _ in range(choose.randrange(40))]
    try:
        play(World(False, choose.choice(["recompile", "raise"]), "npu", choose.choice(["tensors", "flat"])), sequence)
    except BaseException:
        print("failed:", seed, [(actions[number], place) for number, place in sequence], file=sys.stderr)
        raise
print("done")
"""


def test_mutations_between_devices():
    assert run_python(ON_THE_DEVICE.format(sequences=SEQUENCES)).endswith("done\n")
