"""Groups with hyperparameters of their own, which change between steps, against torch.optim."""

from __future__ import annotations

import pytest
import torch

import compiled_optim as co
from catalog import CATALOG
from tests.helpers import assert_close, copies, gradients, parameters

from .formulas import FormulaOfEach
from .pairs import OPTIMIZERS, Pair

SHAPES = [(n % 5 + 2, n % 3 + 1) for n in range(50)]


def one_each(params):
    """Return a group for each parameter, with a learning rate and a weight decay of its own."""
    return [{"params": [p], "lr": 0.1 / (i + 1), "weight_decay": 0.01 * (i + 1)} for i, p in enumerate(params)]


def one_maximizes(params):
    return [{"params": params[:20]}, {"params": params[20:30], "maximize": True}, {"params": params[30:], "lr": 0.03}]


@pytest.mark.parametrize("groups", [one_each, one_maximizes])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_with_their_own_options(name, groups, compiled):
    pair = Pair(name, parameters(SHAPES), compiled, groups=groups)
    pair.steps(5, mask=lambda step, i: (step + i) % 4 > 0)
    pair.agree()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hyperparameters_of_some_groups_change(name, compiled):
    changes = {
        3: {"lr": 0.5},
        7: {"weight_decay": 0.3},
        11: {"maximize": True},
        13: {"momentum": 0.5, "dampening": 0.0} if name == "SGD" else {"betas": (0.5, 0.9), "eps": 1e-3},
        17: {"lr": torch.tensor(0.2)},
        19: {"weight_decay": 0},
    }
    pair = Pair(name, parameters(SHAPES), compiled, groups=one_each)
    pair.steps(2)
    for i, change in changes.items():
        for optimizer in (pair.optimizer, pair.reference):
            optimizer.param_groups[i].update(change)
        pair.steps(1, seed=i)
    for optimizer in (pair.optimizer, pair.reference):
        optimizer.param_groups[11]["maximize"] = False
    pair.steps(2, seed=2)
    pair.agree()


@pytest.mark.parametrize("groups", [one_each, one_maximizes])
def test_max_grad_norm_is_over_all_groups(groups, compiled):
    """SGD, because the steps of Adam hardly depend on the scale of the gradients."""
    ours = parameters(SHAPES)
    theirs = copies(ours)
    options = {"lr": 0.1, "momentum": 0.9}
    optimizer = co.SGD(groups(ours), **options, max_grad_norm=1.0, compile=compiled)
    reference = torch.optim.SGD(groups(theirs), **options)
    for step, grads in enumerate(gradients(ours, 5)):
        for i, (param, twin, grad) in enumerate(zip(ours, theirs, grads, strict=True)):
            present = (step + i) % 4 > 0
            param.grad, twin.grad = (grad, grad.clone()) if present else (None, None)
        norm = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        optimizer.step()
        reference.step()
        torch.testing.assert_close(optimizer.last_grad_norm, norm, check_dtype=False)
    assert_close(ours, theirs, 5e-6)


def test_bert_adam_clips_each_group_and_dtype_by_its_own_norm(compiled):
    shapes = [(4, 3), (5,), (300,)]
    ours = [p for dtype in (torch.float32, torch.float64) * 3 for p in parameters(shapes, dtype)]
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in ours]
    norms = (0.1, 2.0, -1)

    def groups(params):
        return [{"params": params[6 * i : 6 * i + 6], "max_grad_norm": norm} for i, norm in enumerate(norms)]

    options = {"lr": 0.1, "b2": 0.9, "e": 0.1}  # a large epsilon: the steps depend on the scale of the gradients
    optimizer = co.BertAdam(groups(ours), **options, compile=compiled)
    reference = FormulaOfEach(groups(theirs), CATALOG["BertAdam"], **options)
    for step, grads in enumerate(gradients(ours, 6)):
        for i, (param, twin, grad) in enumerate(zip(ours, theirs, grads, strict=True)):
            present = (step + i) % 4 > 0
            param.grad, twin.grad = (grad, grad.clone()) if present else (None, None)
        optimizer.step()
        reference.step()
    assert_close(ours, theirs, 5e-6)
