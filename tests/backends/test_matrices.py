"""Large matrices: chunks are rows of one matrix, and what all rows of it share is computed once."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

import compiled_optim as co
from compiled_optim.backends import disk_cache, table_backend, table_compiler, triton_compiler
from compiled_optim.backends.recording import CannotRecord
from compiled_optim.backends.table import Task, cut_matrices
from compiled_optim.backends.table_passes import UPDATE_PASS
from tests.helpers import assert_close

SHAPES = ((700, 300), (3, 400, 400), (40, 9000), (2, 3, 9, 7), (1, 900), (900, 1), (0, 30), (30, 0))
"""The first three have several chunks for each matrix, the third one of the fewest rows."""

ONE_BY_ONE = "one tensor at a time"


def test_matrices_are_cut_into_rows():
    """A chunk has rows of one matrix, at least 16 of them if there are more. Tensors without elements have no chunk."""
    shapes = [(2, 40, 5), (1, 3, 500), (1, 17, 500), (2, 0, 3), (0, 3, 2), (1, 4, 0)]
    assert cut_matrices(shapes, 125, UPDATE_PASS) == [
        [
            Task(0, 0, 25, 5, 0, UPDATE_PASS, 0),
            Task(0, 25, 15, 5, 1, UPDATE_PASS, 0),
            Task(0, 40, 25, 5, 2, UPDATE_PASS, 1),
            Task(0, 65, 15, 5, 3, UPDATE_PASS, 1),
        ],
        [Task(1, 0, 3, 500, 4, UPDATE_PASS)],
        [Task(2, 0, 16, 500, 5, UPDATE_PASS), Task(2, 16, 1, 500, 6, UPDATE_PASS)],
        [],
        [],
        [],
    ]


def made(shapes, dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def stepped(optimizer, params, steps=3):
    """Make steps. In each, another third of the parameters has no gradient, so step counts differ."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(step + 1)
        for i, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = grad if (i + step) % 3 else None
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
def test_results_are_those_of_torch_in_one_call(dtype, tolerance):
    shapes = [shape for shape in SHAPES if 0 not in shape]
    params, others = made(shapes, dtype), made(shapes, dtype)
    for each, cls in ((params, co.Adafactor), (others, torch.optim.Adafactor)):
        groups = [{"params": each[::2], "lr": 0.1}, {"params": each[1::2], "lr": 0.02, "weight_decay": 0.1}]
        optimizer = stepped(cls(groups), each)
        if each is params:
            report = str(optimizer.explain())
            states = [optimizer.state[param] for param in params]
    assert_close(params, others, tolerance)
    for name in ("row_var", "col_var"):
        expected = [optimizer.state[other][name] for other in others]
        assert_close([own[name] for own in states], expected, tolerance)
    assert ONE_BY_ONE not in report
    assert f"{len(shapes)} tensors in 1 call a step" in report


LOW = torch.bfloat16
CASES = {
    "kahan": (LOW, {"rounding": "kahan", "ema_decay": 0.9, "max_grad_norm": 0.5}),
    "several stages": (LOW, {"cautious": True, "max_grad_norm_per_parameter": 0.5, "rounding": "stochastic"}),
    "states in bfloat16": (torch.float32, {"state_dtype": LOW, "max_grad_norm_per_parameter": 0.5}),
    "states in 8 bits": (torch.float32, {"state_dtype": "8bit", "cautious": True, "ema_decay": 0.9}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_options_work_in_one_call(case):
    """Random bits are those of eager mode too: few elements are rounded in another direction, not half of them."""
    dtype, options = case
    compiled, eager = made(SHAPES, dtype), made(SHAPES, dtype)
    ours = stepped(co.Adafactor(compiled, lr=0.1, **options), compiled)
    theirs = stepped(co.Adafactor(eager, lr=0.1, compile=False, **options), eager)
    assert ONE_BY_ONE not in str(ours.explain())
    for param, other in zip(compiled, eager, strict=True):
        kept = {"param": param.detach(), **ours.state[param]}
        for name, expected in {"param": other.detach(), **theirs.state[other]}.items():
            if expected.dtype == LOW and expected.numel():
                share = float((kept[name] != expected).float().mean())
                assert share < 0.1, f"{share:%} of {name} of {tuple(param.shape)} differs"
            else:
                assert_close([kept[name]], [expected], 2e-3 if dtype == LOW else 2e-5)


class Matrices(co.Optimizer):
    """The base of rules for matrices with states for each column."""

    counts_steps = False
    matrices = True
    reduced_states = {"col": -2, "other": -2}  # noqa: RUF012

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr}, **options)

    def derived(self, group, step):
        return {"col": True, "other": True}


def old_columns(p, g, col=None, other=None, *, lr, mean_over, all_reduce):
    """Use the mean of a state before it was updated, after it was."""
    if col is None:
        p -= lr * g
        return
    before = mean_over(col, -1)
    col.lerp_(mean_over(g * g, -2), 0.5)
    p -= lr * (g.map(torch.mul, before + 1.0) / (col + 0.1))


def largest_of_columns(p, g, col=None, other=None, *, lr, mean_over, all_reduce):
    """Keep values of columns that are no means."""
    if col is None:
        p -= lr * g
        return
    col.maximum_(g.map(lambda grad: grad.amax(-2, keepdim=True)))
    p -= lr * (g / (col + mean_over(g * g, -2)))


def own_sums(p, g, col=None, other=None, *, lr, mean_over, all_reduce):
    """Sum over columns without mean_over."""
    if col is None:
        p -= lr * g
        return
    (squares,) = all_reduce(g.sum_of_squares())
    scaled = g * squares.map(lambda total: (1 / (1 + total.sqrt())).to(p[0].dtype))
    p -= lr * scaled.map(lambda grad: grad - grad.mean(-2, keepdim=True))


def centered(p, g, col=None, other=None, *, lr, mean_over, all_reduce):
    """Have no stage at all."""
    if col is None:
        p -= lr * g
        return
    p -= lr * g.map(lambda grad: grad - grad.mean(-2, keepdim=True))


def two_states(p, g, col=None, other=None, *, lr, mean_over, all_reduce):
    """Use a state before and after it is updated, and update another one from it after a later stage."""
    if col is None:
        p -= lr * g
        return
    before = col + 1.0
    col.lerp_(mean_over(g * g, -2), 0.5)
    (squares,) = all_reduce(p.sum_of_squares())
    other += col * squares.map(lambda total: (total.sqrt() / (1 + total)).to(p[0].dtype))
    p -= lr * (g / (before + col) / (other + 1.0))


REASONS = {
    old_columns: "is needed after its new value was stored",
    largest_of_columns: "depends on elements other than by a mean",
    own_sums: "its results differ from those of the eager program",
    centered: "works on whole matrices",
    two_states: "",
}


@pytest.mark.parametrize("update", REASONS, ids=lambda update: update.__name__)
def test_rules_that_do_not_fit_run_one_tensor_at_a_time(update):
    """explain() says why. Results are right in any case."""
    rule = type("Rule", (Matrices,), {"update": staticmethod(update)})
    shapes = [(700, 300), (2, 30, 20)]
    compiled, eager = made(shapes, torch.float32), made(shapes, torch.float32)
    report = str(stepped(rule(compiled), compiled).explain())
    stepped(rule(eager, compile=False), eager)
    assert_close(compiled, eager, 2e-6)
    assert (ONE_BY_ONE in report) == bool(REASONS[update])
    assert REASONS[update] in report


class Seen(Exception):
    """Ends a step that has shown a signature."""


@pytest.fixture
def signature(monkeypatch):
    """Return the signature of the unit for large matrices in float32."""

    def seen(self, signature):
        raise Seen(signature)

    (param,) = made([(50, 40)], torch.float32)
    param.grad = torch.ones_like(param)
    with monkeypatch.context() as patched:
        patched.setattr(table_backend.TableBackend, "get_unit", seen)
        with pytest.raises(Seen) as caught:
            co.Adafactor([param]).step()
    return caught.value.args[0]


FAULTS = {
    "columns of the first matrix": ("matrix * size1", "0"),
    "sums, not means": ("sums[i] / rows", "sums[i]"),
    "sums of the first chunk": ("chunk < chunks; chunk++", "chunk < 1; chunk++"),
    "one place for all sums": ("(task.slot - table.slots[tensor]) * width", "0"),
    "columns are not updated": ("COLUMNS[stage] != nullptr && ", "false && "),
    "columns of one matrix are updated": ("matrix < table.matrices[tensor]; matrix++", "matrix < 1; matrix++"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_wrong_units_are_refused(fault, signature, monkeypatch):
    """Each unit is compared with the eager program on stacks of matrices with several chunks."""
    passes = compiled_passes(signature)
    write = table_compiler.write_source

    def faulty(*args):
        source = write(*args)
        assert source.count(fault[0]) >= 1
        return source.replace(*fault)

    monkeypatch.setattr(table_compiler, "compile_passes", lambda *args: passes)
    monkeypatch.setattr(table_compiler, "write_source", faulty)
    with pytest.raises(CannotRecord, match="its results differ from those of the eager program"):
        table_compiler.compile_table(signature)


@lru_cache
def compiled_passes(signature):
    """Return the passes of a signature, which all tests share."""
    found = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disk_cache, "save", lambda *args: None)
        original = table_compiler.compile_passes
        patched.setattr(table_compiler, "compile_passes", lambda *args: found.append(original(*args)) or found[0])
        table_compiler.compile_table(signature)
    return found[0]


def test_a_gpu_steps_matrices_one_by_one(signature):
    with pytest.raises(CannotRecord, match="works on whole matrices"):
        triton_compiler.write_module(signature)
