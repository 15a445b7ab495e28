"""Numbers that a rule keeps for each parameter: NAdam's ``mu_product``, ASGD's ``eta`` and ``mu``, and a user's own."""

from __future__ import annotations

import pytest
import torch

import compiled_optim as co
from tests.helpers import SMALL, assert_close, copies, gradients, parameters, slow_decay

OPTIONS = {"NAdam": {"momentum_decay": 0.1}, "ASGD": {"t0": 3.0, "lambd": 0.1}}
NUMBERS = {"NAdam": ("mu_product",), "ASGD": ("eta", "mu")}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
EDITED = 2


class Twins:
    """One of our optimizers and torch's for-loop implementation, each with two groups."""

    def __init__(self, name, compiled, dtype=torch.float32):
        self.name, self.dtype = name, dtype
        ours = parameters(SMALL, dtype)
        theirs = copies(ours)
        self.pairs = [
            (getattr(co, name)(self.groups(ours), **OPTIONS[name], compile=compiled), ours),
            (getattr(torch.optim, name)(self.groups(theirs), **OPTIONS[name], foreach=False), theirs),
        ]
        self.taken = 0

    @staticmethod
    def groups(params):
        return [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.1}]

    def steps(self, count=3, mask=lambda step, i: True):
        """Take steps with other learning rates in every step and group."""
        for optimizer, params in self.pairs:
            for step, grads in enumerate(gradients(params, count, self.taken), self.taken):
                for number, group in enumerate(optimizer.param_groups):
                    group["lr"] = slow_decay(step + number)
                for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
                    param.grad = grad if mask(step, i) else None
                optimizer.step()
        self.taken += count

    def agree(self):
        (optimizer, ours), (reference, theirs) = self.pairs
        assert_close(ours, theirs, TOLERANCE[self.dtype])
        for param, twin in zip(ours, theirs, strict=True):
            found, expected = optimizer.state[param], reference.state[twin]
            assert found.keys() == expected.keys()
            for name in ("step", *NUMBERS[self.name]):
                assert torch.equal(found[name], expected[name]), name
                assert found[name].dtype == expected[name].dtype


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_each_parameter_has_its_own_numbers(name, dtype, compiled):
    """Gradients are absent in some steps, so the step counts and numbers of the parameters differ."""
    twins = Twins(name, compiled, dtype)
    twins.steps(8, lambda step, i: (step * i) % 3 != 1)
    twins.agree()
    twins.steps(4)
    twins.agree()


def in_place(state, name):
    state[name].fill_(0.25)


def through_numpy(state, name):
    state[name].numpy()[...] = 0.25


def replaced(state, name):
    state[name] = torch.tensor(0.25)


@pytest.mark.parametrize("edit", [in_place, through_numpy, replaced], ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("name", OPTIONS)
def test_an_edited_number_takes_effect(name, edit, compiled):
    twins = Twins(name, compiled)
    twins.steps()
    for _ in range(2):
        for optimizer, params in twins.pairs:
            for number in NUMBERS[name]:
                edit(optimizer.state[params[EDITED]], number)
        twins.steps()
        twins.agree()


@pytest.mark.parametrize("name", OPTIONS)
def test_numbers_keep_their_dtype_when_a_parameter_is_converted(name, compiled):
    """In float16, a number would lose its precision."""
    twins = Twins(name, compiled)
    twins.steps()
    optimizer, params = twins.pairs[0]
    kept = {number: optimizer.state[params[0]][number].clone() for number in NUMBERS[name]}
    params[0].data = params[0].data.half()
    optimizer.zero_grad()
    optimizer.step()
    for number, value in kept.items():
        assert torch.equal(optimizer.state[params[0]][number], value)
        assert optimizer.state[params[0]][number].dtype == torch.float32


@pytest.mark.parametrize("value", ["many", torch.ones(2), None], ids=str)
def test_a_number_that_is_none_is_refused(value, compiled):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = co.NAdam([weight], compile=compiled)
    weight.grad = torch.ones(3)
    optimizer.step()
    saved = optimizer.state_dict()
    before = weight.detach().clone()
    optimizer.state[weight]["mu_product"] = value
    with pytest.raises(ValueError, match=r"'mu_product' of parameter 0 of group 0 is .*, not a number; load"):
        optimizer.step()
    assert torch.equal(weight, before)
    saved["state"][0]["mu_product"] = value
    message = r"but no \['mu_product'\]" if value is None else "'mu_product' of .*, not a number"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)


def test_older_checkpoints_have_python_numbers(compiled):
    expected = parameters(SMALL)
    reference = torch.optim.ASGD(expected, lambd=0.1, foreach=False)
    for param, grad in zip(expected, next(gradients(expected, 1)), strict=True):
        param.grad = grad
    reference.step()
    saved = reference.state_dict()
    saved["state"] = {
        key: {name: value if name == "ax" else float(value) for name, value in state.items()}
        for key, state in saved["state"].items()
    }
    params = copies(expected)
    optimizer = co.ASGD(params, compile=compiled)
    optimizer.load_state_dict(saved)
    for param, twin in zip(params, expected, strict=True):
        param.grad = twin.grad
    optimizer.step()
    reference.step()
    assert_close(params, expected, 2e-6)


class Doubling(co.Optimizer):
    """Steps of the length 1, 2, 4, ... times the learning rate in the first step."""

    numbers = {"length": "lr"}  # noqa: RUF012

    def __init__(self, params, lr=0.5, **options):
        super().__init__(params, {"lr": lr}, **options)

    def derived(self, group, step):
        return {"length": 2 * group["length"], "now": group["length"]}

    @staticmethod
    def update(p, g, *, now):
        p -= now * g.sign()


def test_a_rule_of_the_user_keeps_a_number(compiled):
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = Doubling([{"params": [first]}, {"params": [second], "lr": 0.25}], compile=compiled)
    for step in range(3):
        first.grad = torch.ones(2)
        second.grad = torch.ones(2) if step else None
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 100.0  # has no effect any more
    assert first.tolist() == [-3.5, -3.5]
    assert second.tolist() == [-0.75, -0.75]
    assert [float(optimizer.state[param]["length"]) for param in (first, second)] == [4.0, 1.0]
