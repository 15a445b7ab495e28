"""A user edits the step count of one parameter, as for torch.optim. The other parameters keep theirs."""

from __future__ import annotations

import pytest
import torch

import compiled_optim as co
from tests.helpers import SMALL, assert_close, copies, gradients, parameters

EDITED = 2


def in_place(state):
    state["step"].zero_()


def through_data(state):
    state["step"].data.zero_()


def through_detach(state):
    state["step"].detach().fill_(11)


def through_numpy(state):
    state["step"].numpy()[...] = 0


def new_data(state):
    state["step"].data = torch.tensor(7.0)


def replaced(state):
    state["step"] = torch.tensor(0.0)


def replaced_and_edited(state):
    state["step"] = torch.tensor(5.0)
    state["step"].numpy()[...] = 3


EDITS = [in_place, through_data, through_detach, through_numpy, new_data, replaced, replaced_and_edited]


class Twins:
    """One of our optimizers and torch's for-loop implementation."""

    def __init__(self, compiled):
        ours = parameters(SMALL)
        theirs = copies(ours)
        self.pairs = [
            (co.AdamW(ours, lr=0.1, compile=compiled), ours),
            (torch.optim.AdamW(theirs, lr=0.1, foreach=False), theirs),
        ]

    def steps(self, count=3, seed=1, without=()):
        for optimizer, params in self.pairs:
            for grads in gradients(params, count, seed):
                for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
                    param.grad = None if i in without else grad
                optimizer.step()

    def each(self, edit, index=EDITED):
        for optimizer, params in self.pairs:
            edit(optimizer.state[params[index]])

    def agree(self):
        (optimizer, ours), (reference, theirs) = self.pairs
        counts = [[float(opt.state[param]["step"]) for param in params] for opt, params in self.pairs]
        assert counts[0] == counts[1]
        assert_close(ours, theirs, 2e-6)
        for name in ("exp_avg", "exp_avg_sq"):
            found = [optimizer.state[param][name] for param in ours]
            assert_close(found, [reference.state[param][name] for param in theirs], 2e-6)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_one_step_count_is_edited_twice(edit, compiled):
    twins = Twins(compiled)
    twins.steps()
    for seed in (2, 3):
        twins.each(edit)
        twins.steps(seed=seed)
        twins.agree()


@pytest.mark.parametrize("edit", [torch.Tensor.zero_, lambda step: step.numpy().fill(0)], ids=["in place", "numpy"])
def test_a_step_tensor_that_the_user_kept_is_edited(edit, compiled):
    """As in torch.optim, the tensor stays the same one over steps, and shows the current count."""
    twins = Twins(compiled)
    twins.steps()
    kept = [optimizer.state[params[EDITED]]["step"] for optimizer, params in twins.pairs]
    twins.steps(seed=2)
    assert [float(step) for step in kept] == [6.0, 6.0]
    for step in kept:
        edit(step)
    twins.steps(seed=3)
    twins.agree()
    assert [float(step) for step in kept] == [3.0, 3.0]


def test_step_counts_of_parameters_without_gradient_are_edited(compiled):
    """The edit takes effect when the gradient comes back."""
    twins = Twins(compiled)
    twins.steps()
    twins.steps(2, seed=2, without=[EDITED])
    twins.each(through_numpy)
    twins.steps(2, seed=3, without=[EDITED])
    twins.steps(seed=4)
    twins.agree()


def test_every_step_count_is_edited_differently(compiled):
    twins = Twins(compiled)
    twins.steps()
    for i in range(len(SMALL)):
        twins.each(lambda state, i=i: state["step"].fill_(i), i)
    twins.steps(seed=2)
    twins.agree()


def test_step_tensors_are_not_shared(compiled):
    twins = Twins(compiled)
    twins.steps()
    optimizer, params = twins.pairs[0]
    assert len({optimizer.state[param]["step"].data_ptr() for param in params}) == len(params)
