"""The CUDA backend without a GPU: ptxas compiles every driver, launches are counted, and interpreted kernels agree."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from tests.hardware_free import steps
from tests.hardware_free.conftest import require

pytestmark = pytest.mark.slow

NUMBERS = (20, 161, 1000)
INTERPRETED = [*steps.OPTIMIZERS, "AdamW clipped", "Lamb clipped", "Lamb cautious", "AdamP cautious"]
ONE_ROUNDING = 0.501
"""Half a unit in the last place, and the error of computing in float32."""


@pytest.fixture(scope="module")
def lowered(run_script):
    require("torch", "triton")
    return run_script("lower_cuda", TORCHINDUCTOR_COMPILE_THREADS="1")


@pytest.fixture(scope="module")
def interpreted(run_script):
    require("torch", "triton")
    return run_script("interpret_cuda", TORCHINDUCTOR_COMPILE_THREADS="1", TRITON_INTERPRET="1")


def test_launches_of_a_step_do_not_depend_on_the_number_of_tensors(lowered):
    """Parameters are in two groups, unless it says otherwise. Every norm that differs by group costs operations."""
    for case, found in lowered["launches"].items():
        assert len({one["launches"] for one in found}) == 1, f"{case} over {NUMBERS} tensors: {found}"
    assert_expected_inline(
        "\n".join(
            f"{case:19} {found[0]['launches']:2} launches, {found[0]['copies']} copies"
            for case, found in lowered["launches"].items()
        ),
        """\
SGD                  1 launches, 1 copies
Adam                 1 launches, 1 copies
AdamW                1 launches, 1 copies
AdamP                4 launches, 2 copies
SGDP                 4 launches, 2 copies
Lamb                 3 launches, 1 copies
Lars                 3 launches, 1 copies
BertAdam            17 launches, 4 copies
Adadelta             1 launches, 1 copies
RMSprop              1 launches, 1 copies
RMSpropTF            1 launches, 1 copies
Lion                 1 launches, 1 copies
Adan                 1 launches, 1 copies
ScheduleFreeAdamW    1 launches, 1 copies
ScheduleFreeSGD      1 launches, 1 copies
Prodigy              6 launches, 5 copies
Adamax               1 launches, 1 copies
Adagrad              1 launches, 1 copies
RAdam                1 launches, 1 copies
Rprop                1 launches, 1 copies
NAdam                1 launches, 1 copies
ASGD                 1 launches, 1 copies
AdamW clipped        4 launches, 2 copies
Lamb cautious        5 launches, 1 copies
SGD clipped          4 launches, 2 copies
BertAdam, one group  4 launches, 2 copies
Lamb clipped         6 launches, 2 copies
AdamP clipped       11 launches, 4 copies""",
    )


def test_one_compilation_serves_three_models(lowered):
    found = lowered["one compilation"]
    assert found["tensors"] == [161, 148, 1000]
    assert found["launches"] == ["update"] * 3
    assert (found["units"], found["machine code"]) == (1, 1)


def test_ptxas_accepts_every_driver(lowered):
    for label, targets in lowered["drivers"].items():
        assert [one["target"] for one in targets] == ["sm_80", "sm_90a"], label
        assert all(one["machine_code"] for one in targets), label


def test_drivers_load_16_bytes_at_a_time_and_take_few_registers(lowered):
    """The tails and misaligned tensors, which are in the same drivers, do not need more."""
    lines = [f"{'driver':46} registers sm_80 sm_90, bytes spilled, of a load, of a store"]
    for label, (old, new) in lowered["drivers"].items():
        assert max(old["registers"], new["registers"]) <= 128, label
        widths = f"{old['spilled']:2}, {old['load']:2}, {old['store']:2}"
        lines.append(f"{label:46} {old['registers']:3} {new['registers']:3}, {widths}")
        assert label in ("add_up", "clip") or old["load"] == new["load"] == 16, label
    assert_expected_inline(
        "\n".join(lines),
        """\
driver                                         registers sm_80 sm_90, bytes spilled, of a load, of a store
SGD[float32, table] update                      31  30,  0, 16, 16
Adam[float32, table] update                     76  74,  0, 16, 16
AdamW[float32, table] update                    62  61,  0, 16, 16
AdamP[float32, rows, table] measure0           113 114,  0, 16, 16
AdamP[float32, rows, table] update              59  59,  0, 16, 16
AdamP[float32, table] update                    62  61,  0, 16, 16
SGDP[float32, rows, table] measure0             64  47,  0, 16,  4
SGDP[float32, rows, table] update               64  64,  0, 16, 16
SGDP[float32, table] update                     32  30,  0, 16, 16
Lamb[float32, table] measure0                   48  48,  0, 16, 16
Lamb[float32, table] update                     39  40,  0, 16, 16
Lars[float32, table] measure0                   32  32,  0, 16,  4
Lars[float32, table] update                     43  43,  0, 16, 16
squared_norm[float32, table] measure0           32  32,  0, 16,  4
BertAdam[float32, scaled, table] update         64  64,  0, 16, 16
Adadelta[float32, table] update                 64  64,  0, 16, 16
RMSprop[float32, table] update                  76  74,  0, 16, 16
RMSpropTF[float32, table] update                71  71,  0, 16, 16
Lion[float32, table] update                     32  32,  0, 16, 16
Adan[float32, table] update                     86  87,  0, 16, 16
ScheduleFreeAdamW[float32, table] update        69  74,  0, 16, 16
ScheduleFreeSGD[float32, table] update          35  32,  0, 16, 16
Prodigy[float32, measure, table] measure0       32  32,  0, 16,  4
Prodigy[float32, finish, table] update          95  95,  0, 16, 16
Adamax[float32, table] update                   58  57,  0, 16, 16
Adagrad[float32, table] update                  40  40,  0, 16, 16
Adafactor[float32, table] measure0              46  47,  0, 16, 16
Adafactor[float32, table] update                44  40,  0, 16, 16
RAdam[float32, table] update                    64  64,  0, 16, 16
Rprop[float32, table] update                    55  48,  0, 16, 16
NAdam[float32, table] update                    64  64,  0, 16, 16
ASGD[float32, table] update                     31  30,  0, 16, 16
AdamW[float32, scaled, table] update            64  64,  0, 16, 16
Lamb[float32, cautious, table] measure0         48  48,  0, 16, 16
Lamb[float32, cautious, table] measure1         40  39,  0, 16,  4
Lamb[float32, cautious, table] update           63  64,  0, 16, 16
AdamP[float32, rows, measure, table] measure0   78  80,  0, 16,  4
AdamP[float32, rows, finish, table] update      80  80,  0, 16, 16
SGDP[float32, rows, measure, table] measure0    63  48,  0, 16,  4
SGDP[float32, rows, finish, table] update       64  64, 16, 16, 16
Lamb[float32, measure, table] measure0          40  40,  0, 16,  4
Lamb[float32, finish, table] update             74  74,  0, 16, 16
Lars[float32, measure, table] measure0          32  32,  0, 16,  4
Lars[float32, finish, table] update             52  51,  0, 16, 16
AdamW[bfloat16, table] update                   76  77,  0, 16, 16
Lamb[bfloat16, table] measure0                  52  52,  0, 16,  4
Lamb[bfloat16, table] update                    79  80,  0, 16, 16
AdamP[bfloat16, rows, table] measure0          101 107,  0, 16,  4
AdamP[bfloat16, rows, table] update             80  80, 16, 16, 16
AdamP[bfloat16, table] update                   76  77,  0, 16, 16
AdamW[float32+bfloat16, stochastic, table] update  72  73,  0, 16, 16
AdamW[float32+uint8, rows, 8-bit, table] update 112 113,  0, 16, 16
AdamW[bfloat16, stochastic, table] update       96  96,  0, 16, 16
AdamW[bfloat16, kahan, stochastic, table] update 106 104,  0, 16, 16
AdamW[bfloat16+float32, master weights, table] update  98  99,  0, 16, 16
AdamW[float32, unscales, table] update          66  66,  0, 16, 16
Lamb[float32, unscales, table] measure0         59  57,  0, 16, 16
Lamb[float32, unscales, table] update           39  40,  0, 16, 16
add_up                                          48  40,  0,  8,  4
clip                                            40  40,  0,  4,  4""",
    )


@pytest.mark.parametrize("case", INTERPRETED)
def test_interpreted_steps_agree_with_the_reference(interpreted, case):
    """Lengths around the block and the chunk, misaligned tensors, two groups, absent gradients; float64 references."""
    assert interpreted[case]["apart"] <= 1e-6
    assert interpreted[case]["moved"] > 1e-6
    assert interpreted[case]["intact"], "memory around a tensor was written to"
    assert interpreted[case]["limits"] == []


@pytest.mark.parametrize("name", steps.OPTIMIZERS)
def test_bfloat16_is_rounded_once(interpreted, name):
    assert 0 < interpreted["bfloat16"][name] <= ONE_ROUNDING


@pytest.mark.parametrize("case", steps.STORED)
def test_other_storages_agree_with_their_eager_form(interpreted, case):
    """Parameters move by about 0.03; a bfloat16 parameter of 1 is rounded by 0.002."""
    found = interpreted["stored"][case]
    assert found["limits"] == []
    assert found["apart from eager"] <= (2.0**-7 if "bfloat16" not in case else 2e-4)
    assert found["apart"] <= 5e-3


def test_gradients_are_unscaled_in_place_once(interpreted):
    """Inductor unscaled them twice for CUDA, as long as programs had foreach operations."""
    assert interpreted["unscaled"]["limits"] == []
    assert interpreted["unscaled"]["apart"] <= 1e-6
    assert interpreted["unscaled"]["gradients apart"] <= 1e-6


def test_a_wrong_constant_is_detected(interpreted):
    """Negative control: a hyperparameter of one row is wrong by one percent."""
    assert interpreted["wrong constant"]["apart"] > 1e-5


def test_a_shifted_pointer_is_detected(interpreted):
    """Negative control: addresses are wrong by one element, so values are wrong and guarded memory is written to."""
    assert interpreted["shifted pointer"]["apart"] > 1e-5
    assert not interpreted["shifted pointer"]["intact"]


def test_a_unit_that_computes_something_else_is_replaced(interpreted):
    found = interpreted["exchanged inputs"]
    assert found["limits"] == ["its results differ from those of the eager program"]
    assert found["apart"] <= 1e-6


def test_a_rule_that_does_not_fit_is_stepped_tensor_by_tensor(interpreted):
    assert interpreted["fallback"]["apart"] <= 1e-6
    assert "cannot be cut into chunks" in interpreted["fallback"]["reason"]


def test_units_are_found_again_without_inductor(run_script, tmp_path):
    require("torch", "triton")
    cache = {name: str(tmp_path) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    first, second = (
        run_script("reload_cuda", *arguments, TORCHINDUCTOR_COMPILE_THREADS="1", TRITON_INTERPRET="1", **cache)
        for arguments in ([], ["reload"])
    )
    for name in ("AdamW", "Lamb", "AdamP"):
        assert set(first[name]["sources"]) == {"compiled now"}
        assert set(second[name]["sources"]) == {"disk cache"}
        assert first[name]["values"] == second[name]["values"]
    assert second["imported"] == []
    assert second["loads"] == [True, False], "a damaged module must not be loaded"
