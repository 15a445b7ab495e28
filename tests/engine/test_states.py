"""Tests of states and step counts that users load, replace or edit, and of copies of an optimizer.

These are cases in which torch_npu's fused optimizers fail. Each is compared with torch.optim.
"""

from __future__ import annotations

import copy
import pickle

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
