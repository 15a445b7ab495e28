"""Results do not depend on the number of threads, nor on what other Python threads do.

Bits are compared, because a sum that threads share in another order differs in its last bits only.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import compiled_optim as co
from catalog import CATALOG
from tests.helpers import gradients, parameters

SHAPES = [(1,), (3,), (1_000,), (20_000,), (70_000,), (300_000,), (7, 11), (500, 130), (2, 40_000), (60_000, 2)]
FEW = [(5,), (3, 4), (100, 20), (300, 200)]
STEPS = 3


@pytest.fixture(autouse=True)
def _restored_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def _frequent_switches() -> Iterator[None]:
    """Let Python threads take turns every few instructions, and not only every 5 ms."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


class Work:
    """Steps of one optimizer, with the gradients made beforehand."""

    def __init__(self, name, shapes=SHAPES, steps=STEPS, seed=0, dtype=torch.float32, **options):
        self.params = parameters(shapes, dtype, seed)
        self.gradients = list(gradients(self.params, STEPS, seed + 1))
        self.count = steps
        self.optimizer = getattr(co, name)(self.params, **{**CATALOG[name].typical, **options})

    def run(self, threads=(None,)):
        """Make all steps, each with the next number of threads; return the bits of parameters and states."""
        for step, number in zip(range(self.count), itertools.cycle(threads), strict=False):
            if number is not None:
                torch.set_num_threads(number)
            for param, grad in zip(self.params, self.gradients[step % STEPS], strict=True):
                param.grad = grad
            self.optimizer.step()
        states = [value for param in self.params for _, value in sorted(self.optimizer.state[param].items())]
        return [tensor.detach().flatten() for tensor in (*self.params, *states)]


def assert_same_bits(results, expected):
    for i, (found, wanted) in enumerate(zip(results, expected, strict=True)):
        assert torch.equal(found, wanted), f"tensor {i} of {len(wanted)} elements differs"


CASES = [(name, {}) for name in CATALOG] + [(name, {"max_grad_norm": 0.5}) for name in ("SGD", "AdamW", "Lamb")]
IDS = [name + " clipped" * bool(options) for name, options in CASES]
WITH_SUMS = ["Lamb", "AdamP", "SGD clipped"]


def assert_threads_do_not_matter(name, **options):
    """Compare with one thread, also if the number changes between the steps of an optimizer."""
    expected = Work(name, **options).run([1])
    for threads in ([2], [4], [4, 1, 2]):
        assert_same_bits(Work(name, **options).run(threads), expected)


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_bits_do_not_depend_on_the_number_of_threads(name, options):
    assert_threads_do_not_matter(name, **options)


@pytest.mark.parametrize(("name", "options"), [CASES[IDS.index(case)] for case in WITH_SUMS], ids=WITH_SUMS)
def test_sums_in_float64_are_added_in_one_order(name, options):
    """Where a sum has more bits than its result, as in float32, another order may not show."""
    assert_threads_do_not_matter(name, dtype=torch.float64, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_means_over_rows_are_added_in_one_order(dtype):
    """Each matrix has several chunks, and a stack has several matrices."""
    assert_threads_do_not_matter("Adafactor", shapes=[(900, 400), (3, 400, 400), (20, 30)], dtype=dtype)


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_bits_are_the_same_in_every_run(name, options):
    assert_same_bits(Work(name, **options).run([2]), Work(name, **options).run([2]))


@pytest.mark.usefixtures("_frequent_switches")
@pytest.mark.parametrize(
    "names",
    [["AdamW"] * 3, ["BertAdam"] * 2 + ["Lamb"], ["SGD", "AdamW", "AdamP"]],
    ids=["one class", "with norms", "several classes"],
)
def test_python_threads_that_step_their_own_optimizers(names):
    def work():
        return [Work(name, FEW, steps=50, seed=seed) for seed, name in enumerate(names)]

    def run(each):
        start.wait()
        return each.run()

    torch.set_num_threads(2)
    expected = [each.run() for each in work()]
    start = threading.Barrier(len(names))
    with ThreadPoolExecutor(len(names)) as pool:
        results = list(pool.map(run, work()))
    for found, wanted in zip(results, expected, strict=True):
        assert_same_bits(found, wanted)
