"""Flat buffers on the NPU without an NPU: torchair's converters build the GE graphs, and an interpreter runs them."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from catalog import CATALOG
from tests.hardware_free import steps
from tests.hardware_free.conftest import require
from tests.rules.test_npu import EXAMPLES

pytestmark = pytest.mark.slow
LIMITS = {"SGD": 8, "AdamW": 14, "Lion": 10, "Lamb": 30, "AdamP": 100}
IN_LISTS = ("Adafactor", "Prodigy")
"""Optimizers that do not, or not always, work on flat buffers: whole matrices, and sums over all parameters."""

KINDS = {"module.cpu()": ["device", "device"], "a new object": ["replaced"], "None": ["removed"]}


@pytest.fixture(scope="module")
def report(run_script):
    require("torch", "torch_npu")
    return run_script("lower_npu_flat")


def flat_nodes(report):
    """Return the nodes of the graphs over flat buffers."""
    return {
        case: {
            count: {kind: numbers for kind, numbers in kinds.items() if ", flat]" in kind}
            for count, kinds in of_case.items()
        }
        for case, of_case in report["nodes"].items()
        if not case.startswith("Prodigy")
    }


def test_the_size_of_a_graph_does_not_depend_on_the_number_of_tensors(report):
    for case, of_case in flat_nodes(report).items():
        assert list(of_case) == ["5", "20", "161"]
        assert of_case["5"] == of_case["20"] == of_case["161"], case
        assert all(len(numbers) == 1 for numbers in of_case["5"].values()), case


def test_compute_nodes(report):
    """All nodes but Data, Const and NetOutput."""
    found = {kind: numbers[0] for of_case in flat_nodes(report).values() for kind, numbers in of_case["161"].items()}
    for name, limit in LIMITS.items():
        own = [kind for kind in found if kind.startswith(f"{name}[float32") and "cautious" not in kind]
        assert max(found[kind] for kind in own) <= limit
    assert_expected_inline(
        "\n".join(f"{kind:40} {number}" for kind, number in sorted(found.items())),
        """\
ASGD[bfloat16, flat]                     11
ASGD[float32, flat]                      6
Adadelta[bfloat16, flat]                 21
Adadelta[float32, flat]                  14
Adafactor[bfloat16, rows, flat]          39
Adafactor[float32, rows, flat]           34
Adagrad[bfloat16, flat]                  12
Adagrad[float32, flat]                   7
AdamP[bfloat16, flat]                    19
AdamP[bfloat16, rows, flat]              80
AdamP[float32, flat]                     12
AdamP[float32, rows, flat]               73
AdamW[bfloat16, flat]                    19
AdamW[bfloat16, scaled, flat]            20
AdamW[float32, flat]                     12
AdamW[float32, scaled, flat]             13
Adam[bfloat16, flat]                     22
Adam[float32, flat]                      13
Adamax[bfloat16, flat]                   17
Adamax[float32, flat]                    10
Adan[bfloat16, flat]                     30
Adan[float32, flat]                      19
BertAdam[bfloat16, scaled, flat]         19
BertAdam[float32, scaled, flat]          12
Lamb[bfloat16, rows, cautious, flat]     58
Lamb[bfloat16, rows, flat]               37
Lamb[float32, rows, cautious, flat]      51
Lamb[float32, rows, flat]                30
Lars[bfloat16, rows, flat]               31
Lars[float32, rows, flat]                26
Lion[bfloat16, flat]                     13
Lion[float32, flat]                      8
NAdam[bfloat16, flat]                    21
NAdam[float32, flat]                     14
RAdam[bfloat16, flat]                    20
RAdam[float32, flat]                     13
RMSpropTF[bfloat16, flat]                22
RMSpropTF[float32, flat]                 13
RMSprop[bfloat16, flat]                  22
RMSprop[float32, flat]                   13
Rprop[bfloat16, flat]                    22
Rprop[float32, flat]                     15
SGDP[bfloat16, flat]                     10
SGDP[bfloat16, rows, flat]               71
SGDP[float32, flat]                      5
SGDP[float32, rows, flat]                66
SGD[bfloat16, flat]                      10
SGD[float32, flat]                       5
ScheduleFreeAdamW[bfloat16, flat]        20
ScheduleFreeAdamW[float32, flat]         13
ScheduleFreeSGD[bfloat16, flat]          11
ScheduleFreeSGD[float32, flat]           6
squared_norm[bfloat16, flat]             7
squared_norm[float32, flat]              6""",
    )


@pytest.mark.parametrize("name", steps.OPTIMIZERS)
def test_graphs_agree_with_the_reference(report, name):
    """Twenty tensors and ten steps, compared with torch.optim or the formula of the paper."""
    found = report["executed"][name]
    assert found["apart"] <= 1e-6
    assert all(", flat]" in unit for unit in found["units"]) is (name not in IN_LISTS)
    assert found["copied_back"] == 0
    assert found["recompiles"] == 0
    assert found["runs_of_steps"] == found["calls_of_steps"] > 0


@pytest.mark.parametrize("name", steps.OPTIMIZERS)
def test_one_graph_for_two_models(report, name):
    """A rule that sums over tensors needs graphs of its own for each total size of the tensors."""
    expected = 2 if name == "Prodigy" else int(CATALOG[name].sums == "tensor")
    assert report["executed"][name]["graphs_of_another_model"] == expected


def test_hyperparameters_are_one_input(report):
    assert report["executed"]["AdamW"]["inputs"] == 5  # gradients, parameters, two states, hyperparameters


def test_other_storages(report):
    """Parameters move by about 0.3. In bfloat16 without master weights, gradients and weights are rounded."""
    found = report["stored"]
    assert found["master weights"]["units"] == ["AdamW[bfloat16+float32, master weights, flat]"]
    assert found["master weights"]["apart"] < found["bfloat16"]["apart"] < 0.1
    assert found["bfloat16 states"]["apart"] < 0.1


@pytest.mark.parametrize("kind", ["8bit", "stochastic", "stochastic states"])
def test_storages_without_converters_are_refused(report, kind):
    message = report["stored"][kind]
    assert "backend 'npu' cannot compile it" in message
    assert ("state_dtype='8bit'" if kind == "8bit" else "stochastic rounding") in message


@pytest.mark.parametrize("name", EXAMPLES)
def test_scripts_of_torch_npu(report, name):
    found = report["seeds"][name]
    assert found["is_flat"]
    assert max(found["apart"]) <= 3e-4, "the rounding of float16 parameters"
    assert found["apart"][-1] == 0, "no gradient, no step"


@pytest.mark.parametrize("policy", ["recompile", "raise"])
@pytest.mark.parametrize("cause", KINDS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_what_torch_npu_forbids(report, name, cause, policy):
    found = report["seeds"][name]["causes"][f"{cause}, {policy}"]
    assert found["is_flat"]
    if policy == "raise":
        assert found["raised"] == KINDS[cause]
        assert found["unchanged"]
    else:
        assert found["raised"] is None
        assert found["apart"] <= 1e-6
        assert found["events"] == len(KINDS[cause])
