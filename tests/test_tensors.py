"""Lists with operators against the same operators on each tensor, and hyperparameters inside a traced rule."""

from __future__ import annotations

import operator

import pytest
import torch

from compiled_optim.tensors import Scalar, Tensors, where

LEFT = [torch.tensor([0.5, -2.0, 3.0]), torch.tensor([4.0])]
RIGHT = [torch.tensor([1.5, 0.25, -1.0]), torch.tensor([2.0])]

OPERANDS = {
    "list": (RIGHT, RIGHT),
    "number": (1.5, [1.5, 1.5]),
    "0-dim tensor": (torch.tensor(1.5), [1.5, 1.5]),
    "scalar": (Scalar(torch.tensor(1.5), torch.tensor(-0.5)), [1.5, 1.5]),
}
OPERATORS = ("add", "sub", "mul", "truediv", "lt", "gt")


@pytest.mark.parametrize("kind", OPERANDS)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_work_tensor_by_tensor(name, kind):
    operand, each = OPERANDS[kind]
    apply = getattr(operator, name)
    operand = Tensors(operand) if isinstance(operand, list) else operand
    for found, a, b in zip(apply(Tensors(LEFT), operand), LEFT, each, strict=True):
        assert torch.equal(found, apply(a, b))
    if name in ("add", "sub", "mul", "truediv") and kind != "list":
        for found, a, b in zip(apply(operand, Tensors(LEFT)), LEFT, each, strict=True):
            torch.testing.assert_close(found, apply(b, a))


@pytest.mark.parametrize("kind", OPERANDS)
@pytest.mark.parametrize("name", ["iadd", "isub", "imul", "itruediv"])
def test_operators_in_place_write_to_the_same_memory(name, kind):
    operand, each = OPERANDS[kind]
    tensors = Tensors(tensor.clone() for tensor in LEFT)
    memory = [tensor.data_ptr() for tensor in tensors]
    result = getattr(operator, name)(tensors, operand)
    assert result is tensors
    assert [tensor.data_ptr() for tensor in result] == memory
    for found, a, b in zip(result, LEFT, each, strict=True):
        assert torch.equal(found, getattr(operator, name)(a.clone(), b))


@pytest.mark.parametrize("decay", [0.9, Scalar(torch.tensor(0.9), torch.tensor(1 - 0.9))], ids=["float", "Scalar"])
def test_averages(decay):
    average = Tensors(tensor.clone() for tensor in LEFT)
    average.ema_(Tensors(RIGHT), decay)
    for found, a, b in zip(average, LEFT, RIGHT, strict=True):
        torch.testing.assert_close(found, 0.9 * a + 0.1 * b)
    moved = Tensors(tensor.clone() for tensor in LEFT)
    moved.lerp_(Tensors(RIGHT), 1 - decay)
    for found, a, b in zip(moved, LEFT, RIGHT, strict=True):
        torch.testing.assert_close(found, torch.lerp(a, b, 0.1))
    added = Tensors(tensor.clone() for tensor in LEFT).add_(Tensors(RIGHT), decay)
    for found, a, b in zip(added, LEFT, RIGHT, strict=True):
        torch.testing.assert_close(found, a + 0.9 * b)


def test_one_minus_a_scalar_is_exact():
    beta = Scalar(torch.tensor(0.999), torch.tensor(1 - 0.999))
    assert (1 - beta).item() == torch.tensor(1 - 0.999).item()
    assert (1 - beta.tensor).item() != torch.tensor(1 - 0.999).item(), "what float32 arithmetic gives"


def test_plain_torch_functions_take_scalars():
    lr = Scalar(torch.tensor(0.5), torch.tensor(0.5))
    assert torch.equal(torch._foreach_mul(LEFT, lr)[0], LEFT[0] * 0.5)
    assert torch.equal(LEFT[0] * lr, LEFT[0] * 0.5)
    assert torch.equal(torch.where(LEFT[0] > 0, lr, LEFT[0]), torch.where(LEFT[0] > 0, torch.tensor(0.5), LEFT[0]))
    assert torch.equal(lr**2, torch.tensor(0.25))


def test_sums_of_squares_of_large_tensors():
    """A large tensor is summed by parts."""
    values = torch.randn(700_001, generator=torch.Generator().manual_seed(0))
    (found,) = Tensors([values]).sum_of_squares()
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, values.double().square().sum(), rtol=1e-7, atol=0)


@pytest.mark.parametrize("limits", [(0.0, 2.5), (Scalar(torch.tensor(0.0), torch.tensor(1.0)), 2.5)], ids=str)
def test_clamp(limits):
    tensors = Tensors(tensor.clone() for tensor in LEFT)
    assert tensors.clamp_(*limits) is tensors
    for found, before in zip(tensors, LEFT, strict=True):
        assert torch.equal(found, before.clamp(0.0, 2.5))


@pytest.mark.parametrize("kind", OPERANDS)
def test_where(kind):
    operand, each = OPERANDS[kind]
    condition = Tensors(LEFT) > 0.0
    for found, a, b in zip(where(condition, Tensors(LEFT), operand), LEFT, each, strict=True):
        assert torch.equal(found, torch.where(a > 0, a, b))
