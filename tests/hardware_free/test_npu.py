"""The NPU backend without an NPU: torchair's converters build the GE graphs, and an interpreter runs them."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from tests.hardware_free import steps
from tests.hardware_free.conftest import require

pytestmark = pytest.mark.slow
CASES = [
    f"{case} {dtype}"
    for case in [*steps.OPTIMIZERS, *steps.VARIANTS, *steps.SHARDED]
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
SGD float32                44
SGD bfloat16               69
Adam float32               84
Adam bfloat16             129
AdamW float32              76
AdamW bfloat16            111
AdamP float32             324
AdamP bfloat16            359
SGDP float32              289
SGDP bfloat16             314
Lamb float32              183
Lamb bfloat16             218
Lars float32              159
Lars bfloat16             184
BertAdam float32          109
BertAdam bfloat16         149
Adadelta float32           80
Adadelta bfloat16         115
RMSprop float32            78
RMSprop bfloat16          123
RMSpropTF float32          75
RMSpropTF bfloat16        120
Lion float32               59
Lion bfloat16              84
Adan float32              124
Adan bfloat16             179
ScheduleFreeAdamW float32  82
ScheduleFreeAdamW bfloat16 117
ScheduleFreeSGD float32    48
ScheduleFreeSGD bfloat16   73
Prodigy float32           265
Prodigy bfloat16          345
Adamax float32             62
Adamax bfloat16            97
Adagrad float32            46
Adagrad bfloat16           71
Adafactor float32         237
Adafactor bfloat16        268
RAdam float32              83
RAdam bfloat16            118
Rprop float32             108
Rprop bfloat16            143
NAdam float32              85
NAdam bfloat16            120
ASGD float32               49
ASGD bfloat16              74
AdamW clipped float32     112
AdamW clipped bfloat16    152
Lamb cautious float32     290
Lamb cautious bfloat16    325
AdamP sharded float32     387
AdamP sharded bfloat16    434
SGDP sharded float32      330
SGDP sharded bfloat16     364
Lamb sharded float32      252
Lamb sharded bfloat16     307
Lars sharded float32      173
Lars sharded bfloat16     208""",
    )
    adamw = counts["AdamW float32"]
    assert_expected_inline(
        "\n".join(f"{operation} {count}" for operation, count in adamw.items()),
        """\
Add 5
Const 3
Data 21
ForeachAddList 2
ForeachDivList 1
ForeachMulList 1
ForeachSubList 1
Mul 35
NetOutput 1
Sqrt 5
Unpack 1""",
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
