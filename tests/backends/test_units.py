"""No unit runs on inputs it was not compiled for. There are no Dynamo guards: signatures cover all assumptions."""

from __future__ import annotations

import itertools
from array import array
from pathlib import Path

import pytest
import torch

import compiled_optim as co
from compiled_optim.backends import (
    ArgumentSpec,
    BoundArguments,
    Lane,
    ScalarRows,
    Signature,
    Unit,
    cpu,
    disk_cache,
    table_backend,
    table_passes,
    tensor_by_tensor,
)
from compiled_optim.backends import get as get_backend
from compiled_optim.errors import BackendUnavailableError
from compiled_optim.program import Arguments, SquaredNormProgram
from compiled_optim.storage import Direct, Rounded
from compiled_optim.update_program import Phase, UpdateProgram
from tests.helpers import assert_close, copies, distance, run_python


def zoo(seed):
    """Return tensors of different dtypes, shapes and memory layouts, which signatures must distinguish."""
    torch.manual_seed(seed)
    return {
        "float32": torch.randn(6, 4),
        "float64": torch.randn(6, 4, dtype=torch.float64),
        "bfloat16": torch.randn(6, 4).bfloat16(),
        "float16": torch.randn(6, 4).half(),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "0-dim": torch.randn(()) + 30,
        "1-element": torch.randn(1) + 30,
        "0-element": torch.randn(0, 4),
        "non-contiguous": torch.randn(6, 8)[:, ::2],
        "transposed": torch.randn(4, 6).t(),
        "expanded gradient": torch.randn(5, 4),
        "complex": torch.randn(3, 2, dtype=torch.complex64),
        "large": torch.randn(200, 200),
        "large float64": torch.randn(200, 200, dtype=torch.float64),
    }


def fresh_gradients(params):
    for kind, param in params.items():
        param.grad = (
            torch.randn(4, dtype=param.dtype).expand(5, 4) if kind == "expanded gradient" else torch.randn_like(param)
        )


TOLERANCE = {torch.float64: 1e-12, torch.bfloat16: 1e-2, torch.float16: 2e-3}
OPTIONS = {
    "SGD": [dict(lr=0.1), dict(lr=0.1, momentum=0.9), dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)],
    "AdamW": [dict(lr=0.01, eps=1e-4), dict(lr=0.01, eps=1e-4, amsgrad=True), dict(lr=0.01, eps=1e-4, maximize=True)],
}


@pytest.mark.parametrize("order", ["as listed", "reversed"])
def test_a_mixed_optimizer_and_several_in_one_process(order):
    """Each optimizer has all kinds of parameters. Their steps are interleaved and compared with torch."""
    runs = []
    for name, option_list in OPTIONS.items():
        for options in option_list:
            params = {kind: torch.nn.Parameter(value) for kind, value in zoo(0).items()}
            if order == "reversed":
                params = dict(reversed(params.items()))
            # torch rounds after every low-precision operation, so the reference is its float64 run
            twins = dict(zip(params, copies(list(params.values())), strict=True))
            for kind in ("bfloat16", "float16"):
                twins[kind] = torch.nn.Parameter(params[kind].detach().double())
            ours = getattr(co, name)(list(params.values()), **options)
            theirs = getattr(torch.optim, name)(list(twins.values()), **options, foreach=False)
            runs.append((params, twins, ours, theirs))
    for _ in range(3):
        for params, twins, ours, theirs in runs:
            fresh_gradients(params)
            for kind, twin in twins.items():
                twin.grad = params[kind].grad.clone().to(twin.dtype)
            ours.step()
            theirs.step()
            for kind, param in params.items():
                assert distance(param, twins[kind]) <= TOLERANCE.get(param.dtype, 2e-6), (kind, type(ours).__name__)


def test_signatures_differ_in_everything_a_graph_assumes():
    def program(**changes):
        fields = dict(
            name="x", update=co.SGD.update, states=("m",), scalars=("lr",), flags=(("a", True),), scaled=False
        )
        return UpdateProgram(**{**fields, **changes})

    base = dict(
        program=program(),
        device="cpu",
        rank=1,
        dtypes=(torch.float32,) * 3,
        arguments=(ArgumentSpec("scalars", torch.float32, (2,)),),
        lane=table_backend.TABLE,
    )
    variants = [
        {},
        {"program": program(update=co.Adam.update)},
        {"program": program(states=("v",))},
        {"program": program(scalars=("lr", "wd"))},
        {"program": program(flags=(("a", False),))},
        {"program": program(dtype=torch.float64)},
        {"program": program(storages=(Direct(), Rounded()))},
        {"program": program(phase=Phase.MEASURE)},
        {"program": program(scaled=True)},
        {"program": SquaredNormProgram(torch.float32)},
        {"device": "cuda"},
        {"rank": 2},
        {"dtypes": (torch.float32, torch.bfloat16, torch.float32)},
        {"dtypes": (torch.float32,) * 4},
        {"arguments": (ArgumentSpec("scalars", torch.float64, (2,)),)},
        {"arguments": (ArgumentSpec("scalars", torch.float32, (4,)),)},
        {"arguments": (ArgumentSpec("grad_scale", torch.float32, (2,)),)},
        {"lane": Lane("list", 1)},
        {"lane": Lane("table", 2)},
    ]
    signatures = [Signature(**{**base, **variant}) for variant in variants]
    for a, b in itertools.combinations(signatures, 2):
        assert a != b
    assert Signature(**{**base, "program": program(name="y")}) == signatures[0], "a name changes no graph"


SGD = UpdateProgram(
    "SGD",
    co.SGD.update,
    states=("momentum_buffer",),
    scalars=("lr", "momentum", "gain", "weight_decay"),
    flags=(("has_weight_decay", True), ("nesterov", True)),
    scaled=False,
)
SGD_SIGNATURE = Signature(
    SGD, "cpu", 1, (torch.float32,) * 3, (ArgumentSpec("scalars", torch.float32, (8,)),), table_backend.TABLE
)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 1000, 40000])
def test_one_unit_takes_every_length_and_every_number_of_tensors(size):
    rows = [[0.1, 0.9, 0.7, 0.01], [0.2, 0.8, 0.5, 0.03]]
    for count in (1, 2, 5):
        scalars = ScalarRows(4, max(count, 2), torch.float32)
        scalars.fill(rows)
        scalars.row_of[:count] = array("q", [i % 2 for i in range(count)])
        torch.manual_seed(size)
        lists = [[torch.randn(max(size - i, 0)) for i in range(count)] for _ in range(3)]
        expected = [[tensor.clone() for tensor in tensors] for tensors in lists]
        unit = get_backend("cpu").get_unit(SGD_SIGNATURE)
        unit.bind([tuple(tensor.shape) for tensor in lists[0]], lists[1:], BoundArguments(scalars))(lists[0])
        for i in range(count):
            SGD([[tensors[i]] for tensors in expected], Arguments(rows[i % 2]))
        for actual, reference in zip(lists, expected, strict=True):
            assert_close(actual, reference, 1e-6)


def test_units_are_made_once_and_shared(monkeypatch):
    backend = cpu.CpuBackend()
    made = []
    monkeypatch.setattr(cpu, "load_table", lambda signature: made.append(signature) or Fake())
    optimizers = [co.AdamW([torch.nn.Parameter(torch.ones(n))], backend=backend) for n in (3, 4)]
    optimizers.append(co.Adam([torch.nn.Parameter(torch.ones(5))], decoupled_weight_decay=True, backend=backend))
    for optimizer in optimizers:
        optimizer.warmup()
        optimizer.warmup()
    assert len(made) == 1


class Fake(Unit):
    def bind(self, shapes, lists, arguments):
        raise NotImplementedError


@pytest.fixture
def tampered(monkeypatch):
    """Return a function that makes a module trace graphs with two inputs exchanged, and compile everything again."""
    monkeypatch.setattr(disk_cache, "load", lambda *args: None)
    original = table_passes.trace

    def exchanged(*args, **kwargs):
        graph = original(*args, **kwargs)
        places = [place for place, (source, _) in enumerate(graph.inputs) if isinstance(source, int)]
        graph.inputs[places[0]], graph.inputs[places[-1]] = graph.inputs[places[-1]], graph.inputs[places[0]]
        return graph

    return lambda module: monkeypatch.setattr(module, "trace", exchanged)


def test_code_that_computes_something_else_is_refused(tampered):
    """Wrong code, for example from another version of torch, is detected before any parameter is changed."""
    tampered(table_passes)
    tampered(tensor_by_tensor)
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = co.AdamW([param], backend=cpu.CpuBackend())
    param.grad = torch.ones(3)
    with pytest.raises(BackendUnavailableError, match="does not compute what its eager form does"):
        optimizer.step()
    assert param.tolist() == [1.0] * 3
    assert not optimizer.state


def test_a_table_unit_that_computes_something_else_is_replaced(tampered):
    """Then tensors are stepped one by one, and explain() says so. Rows and absent gradients work as usual."""
    tampered(table_passes)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in [(3,), (5, 4), (2, 3), (0,)]]
    theirs = copies(ours)
    optimizer, reference = co.AdamW(ours, lr=0.1, backend=cpu.CpuBackend()), torch.optim.AdamW(theirs, lr=0.1)
    for step in range(4):
        for i, (param, twin) in enumerate(zip(ours, theirs, strict=True)):
            param.grad = None if i == 1 and step == 2 else torch.randn_like(param)
            twin.grad = None if param.grad is None else param.grad.clone()
        optimizer.step()
        reference.step()
    assert_close(ours, theirs, 2e-6)
    text = str(optimizer.explain())
    assert "one tensor at a time" in text
    assert "its results differ from those of the eager program" in text


NEW_THREADS = """
import os, torch, compiled_optim as co
torch.set_num_threads(1)
param = torch.nn.Parameter(torch.zeros(2000, 1000))
param.grad = torch.zeros_like(param)
optimizer = co.AdamW([param])
optimizer.step()
for count in (1, 2, 3):
    torch.set_num_threads(count)
    before = len(os.listdir("/proc/self/task"))
    optimizer.step()
    print(len(os.listdir("/proc/self/task")) - before)
    assert torch.get_num_threads() == count
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of threads")
def test_a_step_runs_on_as_many_threads_as_torch_is_set_to():
    """The number is read at each step. OpenMP keeps its threads, so only those that are missing are started."""
    param = torch.nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    co.AdamW([param]).step()  # so that the process loads the unit: a compiler has threads of its own
    assert run_python(NEW_THREADS).split() == ["0", "1", "1"]
