"""No unit runs on inputs it was not compiled for. There are no Dynamo guards: signatures cover all assumptions."""

from __future__ import annotations

import itertools
import os
import time
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
    table_compiler,
    tensor_by_tensor,
)
from compiled_optim.backends import get as get_backend
from compiled_optim.backends.recording import Pointer
from compiled_optim.backends.table import MEASURE_PASS, UPDATE_PASS, Task, cut, queues
from compiled_optim.errors import BackendUnavailableError
from compiled_optim.program import Arguments, Phase, SquaredNormProgram, UpdateProgram
from compiled_optim.storage import Direct, Rounded
from tests.helpers import assert_close, copies, distance


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
        lane=cpu.TABLE,
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
    SGD, "cpu", 1, (torch.float32,) * 3, (ArgumentSpec("scalars", torch.float32, (8,)),), cpu.TABLE
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
    original = table_compiler.trace

    def exchanged(*args, **kwargs):
        graph = original(*args, **kwargs)
        places = [place for place, (source, _) in enumerate(graph.inputs) if isinstance(source, int)]
        graph.inputs[places[0]], graph.inputs[places[-1]] = graph.inputs[places[-1]], graph.inputs[places[0]]
        return graph

    return lambda module: monkeypatch.setattr(module, "trace", exchanged)


def test_code_that_computes_something_else_is_refused(tampered):
    """Wrong code, for example from another version of torch, is detected before any parameter is changed."""
    tampered(table_compiler)
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
    tampered(table_compiler)
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


BOTH = MEASURE_PASS | UPDATE_PASS


def queued(shapes, passes, threads):
    """Return the tasks of each thread, with chunks of 10 elements."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return queues(sizes, cut(shapes, 10, passes), threads)


def test_tensors_are_cut_into_tasks():
    assert queued([], UPDATE_PASS, 1) == [[]]
    assert queued([(0,), (3, 0), (0, 3)], BOTH, 2) == [[], []]
    assert queued([(4,), (25,)], UPDATE_PASS, 1) == [
        [  # large tensors first
            Task(1, 0, 10, 1, UPDATE_PASS),
            Task(1, 10, 10, 2, UPDATE_PASS),
            Task(1, 20, 5, 3, UPDATE_PASS),
            Task(0, 0, 4, 0, UPDATE_PASS),
        ]
    ]


def test_rows_are_not_cut_and_sums_are_complete_before_an_update():
    """A tensor of one chunk is measured and updated at once, a larger one in two passes, the second from its end."""
    assert queued([(3, 6), (2, 5), (1, 40)], BOTH, 1) == [
        [
            Task(2, 0, 1, 4, BOTH),
            Task(0, 0, 1, 0, MEASURE_PASS),
            Task(0, 1, 1, 1, MEASURE_PASS),
            Task(0, 2, 1, 2, MEASURE_PASS),
            Task(0, 2, 1, 2, UPDATE_PASS),
            Task(0, 1, 1, 1, UPDATE_PASS),
            Task(0, 0, 1, 0, UPDATE_PASS),
            Task(1, 0, 2, 3, BOTH),
        ]
    ]


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_share_the_work(threads):
    shapes = [(1000,), *[(9,)] * 40, (25,), (400,)]
    parts = queued(shapes, UPDATE_PASS, threads)
    assert sorted(task for part in parts for task in part) == sorted(queued(shapes, UPDATE_PASS, 1)[0])
    work = [sum(task.length for task in part) for part in parts]
    assert max(work) - min(work) <= 40


def pointers(rule, rank, monkeypatch):
    """Compile a rule; return the sources of the pointers that each pass reads, and of those that it writes."""
    monkeypatch.setattr(disk_cache, "load", lambda *args: None)
    written = {}
    original = table_compiler.write_source

    def keep(passes, *rest):
        written.update(passes)
        return original(passes, *rest)

    monkeypatch.setattr(table_compiler, "write_source", keep)
    optimizer = rule([torch.nn.Parameter(torch.ones(2, 2))], weight_decay=0.1)
    program = optimizer.program(optimizer.param_groups[0])
    specs = (ArgumentSpec("scalars", torch.float32, (2 * len(program.scalars),)),)
    table_compiler.compile_table(Signature(program, "cpu", rank, (torch.float32,) * 4, specs, cpu.TABLE))
    found = {}
    for name, recording in written.items():
        pairs = [pair for call in recording.calls for pair in zip(call.types, call.arguments, strict=True)]
        places = [(kind, place[0]) for kind, place in pairs if kind.endswith("*") and not isinstance(place, Pointer)]
        found[name] = tuple({source for kind, source in places if kind.startswith("const") == c} for c in (True, False))
    return found


GRAD, PARAM, EXP_AVG, EXP_AVG_SQ = range(4)


@pytest.mark.parametrize(("rule", "rank", "carried"), [(co.Lamb, 1, set()), (co.AdamP, 2, {"carry"})])
def test_a_second_pass_reads_what_the_first_one_stored(rule, rank, carried, monkeypatch):
    """The first pass stores both moments, and AdamP's numbers for each row. The second does not read the gradient."""
    passes = pointers(rule, rank, monkeypatch)
    assert passes["measure"][1] == {EXP_AVG, EXP_AVG_SQ} | carried
    read, written = passes["update"]
    assert written == {PARAM}
    assert read == {PARAM, EXP_AVG, EXP_AVG_SQ, "scalars", "totals"} | carried


TASKS = Path("/proc/self/task")


def working_threads(run):
    """Return the number of threads of this process that did a substantial part of the work of ``run``."""

    def nanoseconds():
        return {task.name: int((task / "schedstat").read_text().split()[0]) for task in TASKS.iterdir()}

    time.sleep(0.5)  # idle threads spin before they sleep
    before = nanoseconds()
    run()
    used = [spent - before.get(thread, 0) for thread, spent in nanoseconds().items()]
    return sum(spent > max(used) / 10 for spent in used)


@pytest.mark.skipif(not (TASKS / str(os.getpid()) / "schedstat").exists(), reason="needs Linux's times of threads")
def test_a_step_runs_on_as_many_threads_as_torch_is_set_to():
    """The number of threads is read at each step, and results do not depend on it."""
    threads = torch.get_num_threads()
    results, working = [], []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            torch.manual_seed(0)
            param = torch.nn.Parameter(torch.randn(2000, 1000))
            optimizer = co.AdamW([param])
            param.grad = torch.randn(2000, 1000)
            optimizer.step()
            working.append(working_threads(lambda optimizer=optimizer: [optimizer.step() for _ in range(20)]))
            assert torch.get_num_threads() == count
            results.append(param)
    finally:
        torch.set_num_threads(threads)
    assert working == [1, 2, 3]
    assert_close(results[1:], results[:1] * 2, 0)


class Twins(co.Optimizer):
    """A rule with a sum that stores one value in two states, after it has read the second one."""

    counts_steps = False

    def __init__(self, params, **options):
        super().__init__(params, {"lr": 0.1}, **options)

    @staticmethod
    def update(params, grads, first, second, *, lr):
        for param, grad, a, b in zip(params, grads, first, second, strict=True):
            a.mul_(0.9).add_(grad)
            param.sub_(lr * (a / (a * a).sum().sqrt() + 1e-4 * b))
            b.copy_(a)


class TwinsInTwoPasses(Twins):
    """The same rule, which can be cut into chunks."""

    @staticmethod
    def update(params, grads, first, second, *, lr, all_reduce):
        for grad, a in zip(grads, first, strict=True):
            a.mul_(0.9).add_(grad)
        (sums,) = all_reduce(first.sum_of_squares())
        for param, a, b, total in zip(params, first, second, sums, strict=True):
            param.sub_(lr * (a / total.sqrt().to(a.dtype) + 1e-4 * b))
            b.copy_(a)


@pytest.mark.parametrize(("rule", "cuts"), [(Twins, False), (TwinsInTwoPasses, True)])
def test_a_value_stored_twice_is_stored_where_it_belongs(rule, cuts):
    """If the second state is stored too early, the rule reads its new value. A rule that sums by itself is not cut."""
    size = 300_000
    ours, eager = ([torch.nn.Parameter(torch.zeros(size))] for _ in range(2))
    for params, options in ((ours, {}), (eager, {"compile": False})):
        optimizer = rule(params, **options)
        for step in range(3):
            params[0].grad = torch.linspace(-1, 1, size) * (step + 1)
            optimizer.step()
        if params is ours:
            assert ("combines elements of a tensor" not in str(optimizer.explain())) == cuts
    torch.testing.assert_close(ours[0], eager[0], rtol=1e-6, atol=1e-9)
