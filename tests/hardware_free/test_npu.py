"""The NPU backend without an NPU: torchair's converters build the GE graphs, and an interpreter runs them."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from tests.hardware_free import steps
from tests.hardware_free.conftest import require

pytestmark = pytest.mark.slow
CASES = [
    f"{case} {dtype}"
    for case in [*steps.OPTIMIZERS, *steps.CLIPPED, *steps.SHARDED]
    for dtype in ("float32", "bfloat16")
]
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2}


@pytest.fixture(scope="module")
def report(run_script):
    require("torch", "torch_npu")
    return run_script("lower_npu")


def test_every_case_is_lowered_completely(report):
    """The script fails if torchair has no converter for an operation; the number of operations is fixed here."""
    counts = {case: found["operations"] for case, found in report["executed"].items()}
    assert list(counts) == CASES
    assert_expected_inline(
        "\n".join(f"{case:25} {sum(operations.values()):3}" for case, operations in counts.items()),
        """\
SGD float32                66
SGD bfloat16               91
Adam float32              125
Adam bfloat16             170
AdamW float32             117
AdamW bfloat16            152
AdamP float32             395
AdamP bfloat16            430
Lamb float32              233
Lamb bfloat16             268
BertAdam float32          154
BertAdam bfloat16         194
Adadelta float32          113
Adadelta bfloat16         148
RMSprop float32           106
RMSprop bfloat16          151
RMSpropTF float32          97
RMSpropTF bfloat16        142
Lion float32               93
Lion bfloat16             118
Adan float32              194
Adan bfloat16             249
Adamax float32             91
Adamax bfloat16           126
Adagrad float32            57
Adagrad bfloat16           82
RAdam float32             125
RAdam bfloat16            160
Rprop float32             120
Rprop bfloat16            155
NAdam float32             132
NAdam bfloat16            167
ASGD float32               77
ASGD bfloat16             102
AdamW clipped float32     163
AdamW clipped bfloat16    203
AdamP sharded float32     484
AdamP sharded bfloat16    531
Lamb sharded float32      331
Lamb sharded bfloat16     386""",
    )
    adamw = counts["AdamW float32"]
    assert_expected_inline(
        "\n".join(f"{operation} {count}" for operation, count in adamw.items()),
        """\
Add 5
Cast 35
Const 3
Data 28
ForeachAddList 2
ForeachDivList 1
ForeachMulList 1
ForeachSubList 1
Mul 35
NetOutput 1
Sqrt 5""",
    )


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_copied_back(report, case):
    assert report["executed"][case]["copied_back"] == 0


@pytest.mark.parametrize("case", CASES)
def test_graphs_agree_with_eager(report, case):
    found = report["executed"][case]
    assert found["backends"] == ["npu"]
    assert found["apart"] <= TOLERANCE[case.split()[-1]]
    assert found["runs_of_steps"] == found["calls_of_steps"] > 0


@pytest.mark.parametrize("case", CASES)
def test_ten_learning_rates_one_graph(report, case):
    assert report["executed"][case]["built_again"] == 0
    assert report["executed"][case]["recompiles"] == 0


def test_the_device_chooses_the_backend(report):
    assert report["chosen"] == {"npu": "npu", "cpu": "cpu"}
    assert report["mixed"]["before"] == [[[0.5] * 4, [0.5] * 4], ["cpu", "npu"]]


def test_gradients_on_both_devices_are_clipped_by_one_norm(report):
    (params, norm), (expected, expected_norm) = report["clipped"]
    assert expected_norm == 10.0
    assert norm == pytest.approx(expected_norm, rel=1e-6)
    for values, wanted in zip(params, expected, strict=True):
        assert values == pytest.approx(wanted, rel=1e-6)


def test_the_guard_sees_a_parameter_leave_the_device(report):
    (moved, stayed), names = report["mixed"]["after"]
    assert names == ["cpu"]
    assert moved == stayed, "its state went with it"
    assert report["mixed"]["state"] == "cpu"
    assert report["mixed"]["events"] == ["parameter 0 of group 0: device changed from npu:0 to cpu"]
