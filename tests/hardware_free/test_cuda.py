"""The CUDA backend without a GPU: ptxas compiles every kernel, launches are counted, and interpreted kernels agree."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from catalog import CATALOG
from tests.hardware_free import steps
from tests.hardware_free.conftest import require

pytestmark = pytest.mark.slow
MEASURING = {*(name for name, entry in CATALOG.items() if entry.sums), *steps.CLIPPED}


@pytest.fixture(scope="module")
def lowered(run_script):
    require("torch", "triton")
    return run_script("lower_cuda", TORCHINDUCTOR_COMPILE_THREADS="1")


@pytest.fixture(scope="module")
def interpreted(run_script):
    require("torch", "triton")
    return run_script("interpret_cuda", TORCHINDUCTOR_COMPILE_THREADS="1", TRITON_INTERPRET="1")


def test_all_are_lowered(lowered):
    assert set(lowered) == {*steps.OPTIMIZERS, *steps.CLIPPED, *steps.SHARDED}


@pytest.mark.parametrize("case", [*steps.OPTIMIZERS, *steps.CLIPPED, *steps.SHARDED])
def test_ptxas_accepts_every_kernel(lowered, case):
    assert lowered[case]["machine_code"]
    assert lowered[case]["target"] == ["sm_80"]
    assert lowered[case]["arguments"] <= 500, "more than 4 KB of arguments do not fit everywhere"


def test_launches_of_a_step_over_twenty_tensors(lowered):
    launches = {case: found["launches"] for case, found in lowered.items()}
    assert_expected_inline(
        "\n".join(f"{case:13} {count:2}" for case, count in launches.items()),
        """\
SGD            1
Adam           2
AdamW          1
AdamP          7
Lamb           7
BertAdam      12
Adadelta       1
RMSprop        1
RMSpropTF      1
Lion           1
Adan           2
AdamW clipped 11
AdamP sharded 14
Lamb sharded  10""",
    )
    for case, count in launches.items():
        few, some, two_phases = 3, 12, 16
        assert count <= (two_phases if case in steps.SHARDED else some if case in MEASURING else few)


def test_clipping_does_not_wait_for_the_device(lowered):
    assert lowered["AdamW clipped"]["syncs"] == []
    assert lowered["BertAdam"]["syncs"] == []


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lamb", "AdamP"])
def test_interpreted_kernels_agree_with_eager(interpreted, name):
    assert interpreted[name]["apart"] <= 1e-6
    assert interpreted[name]["moved"] > 1e-4
    assert interpreted["launches"] > 0


def test_a_wrong_learning_rate_is_detected(interpreted):
    """Negative control: a learning rate that is wrong by one percent makes the comparison fail."""
    assert interpreted["spoiled"]["apart"] > 1e-6
