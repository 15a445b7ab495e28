"""Tests of states and step counts that users load, replace or edit, and of copies of an optimizer.

These are cases in which torch_npu's fused optimizers fail. Each is compared with torch.optim.
"""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict

import pytest
import torch

import compiled_optim as co
from tests.helpers import SMALL, assert_close, gradients, parameters, train

from .pairs import OPTIMIZERS, Pair


@pytest.fixture(params=OPTIMIZERS)
def name(request):
    return request.param


def continue_both(optimizer, params, other, other_params, steps=3):
    for opt, ps in ((optimizer, params), (other, other_params)):
        for grads in gradients(ps, steps, seed=9):
            for param, grad in zip(ps, grads, strict=True):
                param.grad = grad
            opt.step()


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_by_themselves(name, compiled, how):
    params = parameters(SMALL)
    optimizer = train(
        lambda p: getattr(co, name)(p, **OPTIMIZERS[name], compile=compiled, on_realloc="raise"), params, 3
    )
    clone = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    clone_params = clone.param_groups[0]["params"]
    assert clone.on_realloc == "raise"
    assert clone.compile == compiled
    continue_both(optimizer, params, clone, clone_params)
    assert_close(clone_params, params, 0)
    assert all(a is not b for a, b in zip(params, clone_params, strict=True))


def test_state_of_another_layout_is_fitted(compiled):
    pair = Pair("AdamW", [torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))], compiled)
    pair.steps(2)
    checkpoint = pair.optimizer.state_dict()
    for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        checkpoint["state"][0][key] = checkpoint["state"][0][key].contiguous()
    pair.optimizer.load_state_dict(checkpoint)
    pair.steps(2, seed=3)
    pair.agree()


def test_replaced_and_edited_states_are_used(compiled):
    pair = Pair("AdamW", parameters([(5,), (3, 2)]), compiled)
    pair.steps(2)
    for optimizer, params in ((pair.optimizer, pair.ours), (pair.reference, pair.theirs)):
        optimizer.state[params[0]]["exp_avg"] = torch.full((5,), 0.25)
        optimizer.state[params[1]]["exp_avg_sq"].data = torch.full((3, 2), 0.5)
        optimizer.state[params[0]]["step"] = torch.tensor(7.0)
        optimizer.state[params[1]]["step"] = torch.tensor(7.0)
    pair.steps(1)
    pair.agree()
    for optimizer, params in ((pair.optimizer, pair.ours), (pair.reference, pair.theirs)):
        for param in params:
            optimizer.state[param]["step"] = torch.tensor(11.0)
    pair.steps(1)
    pair.agree()


def test_step_counter_edited_in_place_is_honoured(compiled):
    pair = Pair("AdamW", parameters([(5,)]), compiled)
    pair.steps(2)
    for optimizer, params in ((pair.optimizer, pair.ours), (pair.reference, pair.theirs)):
        optimizer.state[params[0]]["step"].fill_(50)
    pair.steps(2)
    pair.agree()
    assert int(pair.optimizer.state[pair.ours[0]]["step"]) == 52


def test_state_dict_step_tensors_are_not_shared(compiled):
    optimizer = train(lambda p: co.AdamW(p, compile=compiled), parameters(SMALL), 2)
    steps = [state["step"] for state in optimizer.state_dict()["state"].values()]
    assert len({step.data_ptr() for step in steps}) == len(steps)


@pytest.mark.parametrize("step", [float("nan"), -1.0, 2.5, "3"], ids=str)
def test_a_step_that_is_no_count_is_refused(step, compiled):
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = co.AdamW([("weight", weight)], compile=compiled)
    optimizer.step()
    before = weight.detach().clone()
    optimizer.state[weight]["step"] = step if isinstance(step, str) else torch.tensor(step)
    with pytest.raises(ValueError, match=r"'step' of parameter 'weight' is .*not a number of steps"):
        optimizer.step()
    assert torch.equal(weight, before)


def test_integer_states_are_refused_when_assigned_and_converted_when_loaded(compiled):
    weight, twin = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer, reference = co.AdamW([("weight", weight)], compile=compiled), torch.optim.AdamW([twin])
    for param, opt in ((weight, optimizer), (twin, reference)):
        param.grad = torch.ones(3)
        opt.step()
        saved = opt.state_dict()
        saved["state"][0]["exp_avg"] = torch.tensor([1, 2, 3])
        opt.load_state_dict(saved)
        opt.step()
    torch.testing.assert_close(weight, twin)
    optimizer.state[weight]["exp_avg"] = torch.tensor([1, 2, 3])
    with pytest.raises(ValueError, match=r"state 'exp_avg' of parameter 'weight' has dtype torch.int64"):
        optimizer.step()


def test_assigning_the_state_is_noticed(compiled):
    weight, twin = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    for param, opt in (
        (weight, co.AdamW([weight], compile=compiled)),
        (twin, torch.optim.AdamW([twin])),
    ):
        for _ in range(3):
            param.grad = torch.rand(3, generator=torch.Generator().manual_seed(0))
            opt.step()
        opt.state = defaultdict(dict)
        opt.step()
        assert int(opt.state_dict()["state"][0]["step"]) == 1
    torch.testing.assert_close(weight, twin)
