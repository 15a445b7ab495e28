"""Overflows under a GradScaler with ``fused=True`` on accelerators: the device skips the step, and nothing waits."""

from __future__ import annotations

import pytest

from tests.hardware_free.conftest import require

pytestmark = pytest.mark.slow
CASES = ("SGD", "AdamW", "NAdam", "Lamb", "AdamP", "AdamW clipped", "two groups", "unscaled before")
STEPS = 7
MADE = 4.0
"""The number of steps without an overflow."""


@pytest.fixture(scope="module", params=["cuda", "npu"])
def report(request, run_script):
    require("torch", *{"cuda": ["triton"], "npu": ["triton", "torch_npu"]}[request.param])
    environment = {"TRITON_INTERPRET": "1"} if request.param == "cuda" else {}
    return run_script("overflows", request.param, TORCHINDUCTOR_COMPILE_THREADS="1", **environment)


@pytest.mark.parametrize("case", CASES)
def test_steps_with_overflows_equal_those_of_torch(report, case):
    """The reference is torch.optim or a formula in float64, which makes only the steps without an overflow."""
    found = report[case]
    assert found["apart"] <= 2e-7
    assert found["kept"] == 0, "a skipped step changes no parameter"
    assert found["gradients apart"] == 0, "gradients are unscaled, but not in a skipped step"
    assert found["counts"] == [None if case == "SGD" else MADE] * 3
    assert found["scales"] == [8.0, 4.0, 4.0, 2.0, 1.0, 1.0, 2.0]
    assert not found["limits"]


@pytest.mark.parametrize("case", CASES)
def test_the_host_reads_found_inf_in_the_next_step(report, case):
    """The last value is read when the state is used, after the last step."""
    found = report[case]
    assert found["reads"] == [[step, min(step + 1, STEPS - 1)] for step in range(STEPS)]
    assert found["waits"] == []


def test_a_list_of_tensors_on_npus(report):
    assert report.get("AdamW, list", report["AdamW"])["apart"] <= 2e-7


def test_a_parameter_on_the_host(report):
    """If one parameter is on the host, the host reads ``found_inf`` before anything is changed."""
    expected = [[0.0, 0.0], [-1.0, -1.0], [-1.0, -1.0], [-2.9, -2.9]]
    assert report.get("two devices", expected) == expected


def test_an_overflow_in_the_first_step_leaves_no_state(report):
    assert report["first overflow"]


def test_step_counts_that_ignore_overflows_are_seen(report):
    """Negative control: the host believes that no step was skipped."""
    assert report["blind"]["apart"] > 1e-3
    assert report["blind"]["counts"] == [float(STEPS)] * 3
