"""Tensors whose lengths are next to the borders at which a backend may cut them into vectors and chunks.

Every parameter lies inside a larger buffer. Nothing before or after it is written, and no gradient is written.
"""

from __future__ import annotations

import random

import pytest
import torch

import compiled_optim as co
from catalog import CATALOG
from compiled_optim.backends.table import CHUNK
from tests.helpers import copies, gradients, parameters

CHUNKS = (65_536, CHUNK)
LENGTHS = [0, 1, 2, 15, 16, 17, *(n for c in CHUNKS for n in (c - 1, c, c + 1, 2 * c + 3))]
VECTORS = [(n,) for n in LENGTHS]
MATRICES = [(1, n) for n in LENGTHS] + [(n, 2) for n in LENGTHS] + [(3, 16_384), (16_385, 3), (129, 127)]
MARGIN = 5
"""Elements before and after a parameter; odd, so that parameters are not aligned."""

TOLERANCE = {torch.float64: 1e-11, torch.float32: 5e-6, torch.bfloat16: 1e-2}
CASES = [(name, torch.float32) for name in CATALOG] + [("AdamW", torch.bfloat16), ("AdamW", torch.float64)]


class Guarded:
    """A copy of a tensor inside a larger buffer."""

    def __init__(self, tensor, margin_value):
        self.margin_value, length = margin_value, tensor.numel()
        self.buffer = torch.full((length + 2 * MARGIN,), margin_value, dtype=tensor.dtype)
        self.inside = self.buffer[MARGIN : MARGIN + length].view(tensor.shape)
        self.inside.copy_(tensor.detach())

    def check(self):
        margins = torch.cat([self.buffer[:MARGIN], self.buffer[len(self.buffer) - MARGIN :]])
        expected = torch.full_like(margins, self.margin_value)
        torch.testing.assert_close(margins, expected, rtol=0, atol=0, equal_nan=True)


def steady_gradients(params, steps):
    """Gradients whose signs alternate along a tensor and never change: Lion takes no sign of a sum that cancels."""
    for grads in gradients(params, steps):
        signs = [(torch.arange(grad.numel()) % 2 * 2 - 1).view(grad.shape) for grad in grads]
        yield [grad.abs() * sign for grad, sign in zip(grads, signs, strict=True)]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_lengths_next_to_borders(name, dtype):
    """Compared with the reference in float64, element by element: a norm would hide one wrong element."""
    entry = CATALOG[name]
    shapes = VECTORS + MATRICES if getattr(co, name).rowwise else VECTORS
    start = parameters([shape for shape in shapes if entry.steps_empty or 0 not in shape], dtype)
    guarded = [Guarded(param, 1.0) for param in start]
    ours = [torch.nn.Parameter(each.inside) for each in guarded]
    truth = [torch.nn.Parameter(param.detach().double()) for param in start]
    options = {"lr": 0.1, **entry.typical}
    optimizer, reference = getattr(co, name)(ours, **options), entry.reference(truth, **options)
    for grads in steady_gradients(ours, 3):
        margins = [Guarded(grad, float("nan")) for grad in grads]  # a sum that reads too far is NaN
        for param, twin, grad in zip(ours, truth, margins, strict=True):
            param.grad, twin.grad = grad.inside, grad.inside.double()
        optimizer.step()
        reference.step()
        for grad, value in zip(margins, grads, strict=True):
            grad.check()
            assert torch.equal(grad.inside, value)
        for each in guarded:
            each.check()
    for param, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(param.double(), true, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_long_tensors_without_gradient_are_skipped():
    choose = random.Random(0)
    ours = parameters(VECTORS)
    theirs = copies(ours)
    optimizer, reference = co.AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    for grads in gradients(ours, 10):
        before = [param.detach().clone() for param in ours]
        for param, twin, grad in zip(ours, theirs, grads, strict=True):
            param.grad, twin.grad = choose.choice([(None, None), (grad, grad.clone())])
        optimizer.step()
        reference.step()
        assert all(torch.equal(p, old) for p, old in zip(ours, before, strict=True) if p.grad is None)
    for param, twin in zip(ours, theirs, strict=True):
        torch.testing.assert_close(param, twin, rtol=5e-6, atol=5e-6)


def test_nothing_next_to_the_states_is_written():
    params = parameters(VECTORS)
    optimizer = co.AdamW(params, lr=0.1)

    def step():
        (grads,) = gradients(params, 1)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()

    step()
    guarded = []
    for param in params:
        for name in ("exp_avg", "exp_avg_sq"):
            guarded.append(Guarded(optimizer.state[param][name], 1.0))
            optimizer.state[param][name] = guarded[-1].inside
    before = [each.inside.clone() for each in guarded]
    step()
    for each, value in zip(guarded, before, strict=True):
        each.check()
        assert (each.inside != value).all(), "the states in the buffers are in use"


def at_borders(shape):
    """Return a tensor that is 1 at its ends and on both sides of every possible border, and 0 elsewhere."""
    flat = torch.zeros(shape).flatten()
    places = [0, len(flat) - 1, *(k * c + i for c in CHUNKS for k in (1, 2, 4, 8) for i in (-1, 0))]
    flat[[place for place in places if place < len(flat)]] = 1.0
    return flat.view(shape)


def test_the_norm_has_every_element_once():
    grads = [at_borders((n,)) for n in LENGTHS if n]
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    optimizer = co.SGD(params, lr=0.1, max_grad_norm=1.0)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    optimizer.step()
    expected = float(torch.cat(grads).double().norm())
    assert optimizer.last_grad_norm.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("name", "shapes"), [("Lamb", VECTORS), ("AdamP", MATRICES)])
def test_sums_of_a_rule_have_every_element_once(name, shapes):
    """All but a few elements are zero, so each of the others matters to the result."""
    entry = CATALOG[name]
    start = [at_borders(shape) for shape in shapes if 0 not in shape]
    ours = [torch.nn.Parameter(value.clone()) for value in start]
    truth = [torch.nn.Parameter(value.double()) for value in start]
    options = {"lr": 0.1, **entry.typical}
    for optimizer, params in ((getattr(co, name)(ours, **options), ours), (entry.reference(truth, **options), truth)):
        for step in range(2):
            for param, value in zip(params, start, strict=True):
                param.grad = (value * (step + 1) * torch.linspace(-1, 2, value.numel()).view(value.shape)).to(
                    param.dtype
                )
            optimizer.step()
    for param, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(param.double(), true, rtol=5e-6, atol=5e-6)
