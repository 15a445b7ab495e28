"""Tables: how tensors are cut into tasks, how threads share them, and what the two passes of a rule read and write."""

from __future__ import annotations

import pytest
import torch

import compiled_optim as co
from compiled_optim.backends import ArgumentSpec, Signature, disk_cache, table_backend, table_compiler, table_vectors
from compiled_optim.backends.recording import Pointer
from compiled_optim.backends.table import Task, cut, in_blocks, queues
from compiled_optim.backends.table_passes import UPDATE_PASS, measure_pass
from compiled_optim.quantization import BLOCK

MEASURE_PASS = measure_pass(0)
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
            Task(1, 0, 10, 1, 1, UPDATE_PASS),
            Task(1, 10, 10, 1, 2, UPDATE_PASS),
            Task(1, 20, 5, 1, 3, UPDATE_PASS),
            Task(0, 0, 4, 1, 0, UPDATE_PASS),
        ]
    ]


def test_rows_are_not_cut_and_sums_are_complete_before_an_update():
    """A tensor of one chunk is measured and updated at once, a larger one in two passes, the second from its end."""
    assert queued([(3, 6), (2, 5), (1, 40)], BOTH, 1) == [
        [
            Task(2, 0, 1, 40, 4, BOTH),
            Task(0, 0, 1, 6, 0, MEASURE_PASS),
            Task(0, 1, 1, 6, 1, MEASURE_PASS),
            Task(0, 2, 1, 6, 2, MEASURE_PASS),
            Task(0, 2, 1, 6, 2, UPDATE_PASS),
            Task(0, 1, 1, 6, 1, UPDATE_PASS),
            Task(0, 0, 1, 6, 0, UPDATE_PASS),
            Task(1, 0, 2, 5, 3, BOTH),
        ]
    ]


def test_the_last_block_is_shorter():
    """A tensor of 2 blocks and 9 elements, whose states are kept in 8 bits."""
    shape = in_blocks((2 * BLOCK + 9,))
    assert cut([shape], BLOCK, UPDATE_PASS) == [
        [
            Task(0, 0, 1, BLOCK, 0, UPDATE_PASS),
            Task(0, 1, 1, BLOCK, 1, UPDATE_PASS),
            Task(0, 2, 1, 9, 2, UPDATE_PASS),
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
        written.update(passes.recordings)
        return original(passes, *rest)

    monkeypatch.setattr(table_compiler, "write_source", keep)
    optimizer = rule([torch.nn.Parameter(torch.ones(2, 2))], weight_decay=0.1)
    program = optimizer.program(optimizer.param_groups[0])
    specs = (ArgumentSpec("scalars", torch.float32, (2 * len(program.scalars),)),)
    table_compiler.compile_table(Signature(program, "cpu", rank, (torch.float32,) * 4, specs, table_backend.TABLE))
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
    assert passes["measure0"][1] == {EXP_AVG, EXP_AVG_SQ} | carried
    read, written = passes["update"]
    assert written == {PARAM}
    assert read == {PARAM, EXP_AVG, EXP_AVG_SQ, "scalars", "totals"} | carried


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


def test_parts_of_vectors_are_not_masked():
    """Inductor's forms of these operations on bfloat16 tensors make a step several times slower."""
    kernel = """
        auto tmp4 = at::vec::Vectorized<at::BFloat16>::loadu(ptr + static_cast<int64_t>(x0), static_cast<int64_t>(16));
        auto tmp36 =
        [&]()
        {
            __at_align__ std::array<float, 16> tmpbuf0;
            tmp13.store(tmpbuf0.data(), static_cast<int64_t>(16));
            __at_align__ std::array<int32_t, 16> tmpbuf_out;
            for (int i = 0; i < static_cast<int64_t>(16); i++)
            {
                tmpbuf_out[i] = c10::bit_cast<int32_t>(tmpbuf0[i]);
            }
            return at::vec::Vectorized<int32_t>::loadu(tmpbuf_out.data(), static_cast<int64_t>(16));
        }
        ()
        ;
        tmp77.store(out + static_cast<int64_t>(x0), static_cast<int64_t>(16));
        tmp78.store(out + static_cast<int64_t>(x0), static_cast<int64_t>(ks0 % 16L));
    """
    lines = [line.strip() for line in table_vectors.improve(kernel).splitlines() if line.strip()]
    assert lines == [
        "auto tmp4 = load_part<at::BFloat16, 16>(ptr + static_cast<int64_t>(x0));",
        "auto tmp36 =",
        "cast_bits<int32_t>(tmp13)",
        ";",
        "store_part<16>(tmp77, out + static_cast<int64_t>(x0));",
        "tmp78.store(out + static_cast<int64_t>(x0), static_cast<int64_t>(ks0 % 16L));",
    ]


def test_numbers_that_are_rounded_already_are_not_rounded_again():
    kernel = """
        auto tmp61 = static_cast<int32_t>(-65536);
        auto tmp62 = at::vec::VectorizedN<int32_t,2>(tmp61);
        auto tmp63 = tmp60 & tmp62;
        auto tmp64 =
        cast_bits<float>(tmp63)
        ;
        auto tmp65 = at::vec::convert<at::BFloat16,1,float,2>(tmp64);
        auto tmp66 = at::vec::convert<at::BFloat16,1,float,2>(tmp51);
        auto tmp64 = tmp1 + tmp2;
        auto tmp67 = at::vec::convert<at::BFloat16>(tmp64);
    """
    found = [line.split(" = ")[1] for line in table_vectors.improve(kernel).splitlines() if " = " in line][-4:]
    assert found == [
        "upper_halves(tmp64);",
        "at::vec::convert<at::BFloat16,1,float,2>(tmp51);",
        "tmp1 + tmp2;",
        "at::vec::convert<at::BFloat16>(tmp64);",
    ]


class Seen(Exception):
    """Ends a step or a compilation that has shown what a test looks at."""


def kernels_of(monkeypatch, dtype, **options):
    """Return the C++ source of the kernels of a step of AdamW, without compiling them."""

    def seen(*arguments):
        raise Seen(arguments[-1])

    param = torch.nn.Parameter(torch.randn(64, 128).to(dtype))
    param.grad = torch.randn_like(param)
    monkeypatch.setattr(table_backend.TableBackend, "get_unit", seen)
    with pytest.raises(Seen) as signature:
        co.AdamW([param], **options).step()
    monkeypatch.setattr(table_compiler.libraries, "build_and_load", seen)
    with pytest.raises(Seen) as source:
        table_compiler.compile_table(signature.value.args[0])
    return source.value.args[0].partition("static void update_part(")[0]


def test_a_block_is_computed_once_and_without_slow_operations(monkeypatch):
    """Else a step with 8-bit states takes twice as long."""
    kernels = kernels_of(monkeypatch, torch.float32, state_dtype="8bit")
    assert "vec_reduce_all<int32_t" not in kernels
    assert kernels.count("load_part<uint8_t") == 2  # the codes of each moment are read once


def test_what_is_rounded_stochastically_is_not_rounded_again(monkeypatch):
    kernels = kernels_of(monkeypatch, torch.bfloat16, rounding="stochastic")
    assert "= upper_halves(" in kernels.partition("C10_UNLIKELY(")[0]
