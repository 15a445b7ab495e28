"""Checkpoints that do not match raise an error that names the mismatch, and the optimizer does not change."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch

import compiled_optim as co
from catalog import CATALOG
from tests.helpers import parameters

from .test_checkpoints import TORCH_NPU_KEYS, advance

SHAPES = [(3, 2), (4,), (5,)]


def grouped(params):
    named = list(zip("abc", params, strict=True))
    return co.AdamW([{"params": named[:2]}, {"params": named[2:], "lr": 0.5}], amsgrad=True, compile=False)


def assert_same(saved, other):
    assert saved["param_groups"] == other["param_groups"]
    torch.testing.assert_close(saved["state"], other["state"], rtol=0, atol=0)


def edited(change):
    def edit(saved):
        change(saved)
        return saved

    return edit


def state(number, name, value):
    return edited(lambda saved: saved["state"][number].__setitem__(name, value))


def without(number, name):
    return edited(lambda saved: saved["state"][number].__delitem__(name))


CORRUPT = {
    "no checkpoint": (lambda saved: None, "NoneType is not a checkpoint of an optimizer"),
    "all of a training's": (
        lambda saved: {"model": {}, "optimizer": saved},
        r"a dict with \['model', 'optimizer'\] is not a checkpoint of an optimizer; pass the result of AdamW",
    ),
    "a list of states": (
        lambda saved: {**saved, "state": list(saved["state"].values())},
        r"a dict with \['param_groups', 'state'\] is not a checkpoint of an optimizer",
    ),
    "a group too few": (
        edited(lambda saved: saved["param_groups"].pop()),
        "loaded state dict has a different number of parameter groups: 1, but the optimizer has 2",
    ),
    "a parameter too many": (
        edited(lambda saved: saved["param_groups"][1]["params"].append(3)),
        "doesn't match the size of optimizer's group: group 1 has 2 parameters there and 1 here",
    ),
    "a group without parameters": (
        edited(lambda saved: saved["param_groups"][1].pop("params")),
        "a parameter group of the checkpoint is not a dict with 'params'",
    ),
    "a group that is none": (
        edited(lambda saved: saved["param_groups"].__setitem__(0, "group")),
        "a parameter group of the checkpoint is not a dict with 'params'",
    ),
    "lr as a word": (
        edited(lambda saved: saved["param_groups"][1].update(lr="fast")),
        "group 1 of the checkpoint has an unusable hyperparameter: .*'fast'",
    ),
    "betas None": (
        edited(lambda saved: saved["param_groups"][0].update(betas=None)),
        "group 0 of the checkpoint has an unusable hyperparameter",
    ),
    "one beta": (
        edited(lambda saved: saved["param_groups"][0].update(betas=[0.9])),
        "group 0 of the checkpoint has an unusable hyperparameter",
    ),
    "a state missing": (
        without(1, "exp_avg_sq"),
        r"has \['exp_avg', 'max_exp_avg_sq', 'step'\] for parameter 'b', but no \['exp_avg_sq'\], which AdamW keeps",
    ),
    "the step missing": (without(2, "step"), r"for parameter 'c', but no \['step'\]"),
    "a state None": (state(2, "exp_avg", None), r"for parameter 'c', but no \['exp_avg'\]"),
    "a state of another shape": (
        state(0, "max_exp_avg_sq", torch.ones(2, 3)),
        r"state 'max_exp_avg_sq' of parameter 'a' has shape \(2, 3\) and .* but the parameter has \(3, 2\)",
    ),
    "a state of another kind": (
        state(1, "exp_avg", torch.ones(4, dtype=torch.complex64)),
        "state 'exp_avg' of parameter 'b' has .* dtype torch.complex64",
    ),
    "a word for a tensor": (state(2, "exp_avg", "zeros"), "state 'exp_avg' of parameter 'c' is str, not a tensor"),
    "a list for a tensor": (state(2, "exp_avg", [0.0] * 5), "state 'exp_avg' of parameter 'c' is list, not a tensor"),
    "a list for the state": (
        edited(lambda saved: saved["state"].__setitem__(1, [1, 2])),
        "the state of parameter 'b' is list, not a dict",
    ),
    "a step of words": (state(0, "step", "three"), "'step' of parameter 'a' is 'three', not a number of steps"),
    "a step of many": (state(0, "step", torch.ones(2)), r"'step' of parameter 'a' is tensor\(\[1., 1.\]\), not"),
    "a step that is NaN": (state(0, "step", torch.tensor(torch.nan)), r"'step' of parameter 'a' is tensor\(nan\), not"),
    "a step below zero": (state(0, "step", -1), "'step' of parameter 'a' is -1, not"),
    "keys as words": (
        edited(lambda saved: saved.update(state={str(key): value for key, value in saved["state"].items()})),
        "the checkpoint has a state for '0', but none of its groups has such a parameter",
    ),
    "keys of other numbers": (
        edited(lambda saved: saved.update(state={key + 7: value for key, value in saved["state"].items()})),
        "the checkpoint has a state for 7, but none of its groups",
    ),
    "names of states changed": (
        edited(lambda saved: saved["state"].update({1: {"m": torch.ones(4), "v": torch.ones(4), "step": 2}})),
        r"has \['m', 'step', 'v'\] for parameter 'b', but no \['exp_avg', 'exp_avg_sq', 'max_exp_avg_sq'\]",
    ),
    "two parameters swapped": (
        edited(lambda saved: saved["state"].update({1: saved["state"][2], 2: saved["state"][1]})),
        r"state 'exp_avg' of parameter 'b' has shape \(5,\)",
    ),
}


@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "stepped"])
@pytest.mark.parametrize("case", CORRUPT)
def test_what_does_not_fit_is_refused_and_changes_nothing(case, steps):
    spoil, message = CORRUPT[case]
    params, twins, others = parameters(SHAPES), parameters(SHAPES), parameters(SHAPES)
    donor = grouped(others)
    advance(donor, others, 0, 2)
    saved = spoil(copy.deepcopy(donor.state_dict()))
    optimizer, twin = grouped(params), grouped(twins)
    advance(optimizer, params, 0, steps)
    advance(twin, twins, 0, steps)
    groups = [(group, dict(group)) for group in optimizer.param_groups]
    held = {param: dict(values) for param, values in optimizer.state.items()}
    before = copy.deepcopy(optimizer.state_dict())

    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)

    assert len(groups) == len(optimizer.param_groups)
    for group, (old, values) in zip(optimizer.param_groups, groups, strict=True):
        assert group is old
        assert group == values
    assert held.keys() == optimizer.state.keys()
    for param, values in held.items():
        assert values.keys() == optimizer.state[param].keys()
        assert all(optimizer.state[param][name] is value for name, value in values.items())
    assert_same(optimizer.state_dict(), before)
    advance(optimizer, params, steps, 4)
    advance(twin, twins, steps, 4)
    assert all(map(torch.equal, params, twins))


# an optimizer can load a checkpoint that has all its states and hyperparameters
RELATED = {
    *product(["Adam", "AdamW", "Lamb", "AdamP"], ["Adam", "AdamW", "Lamb"]),
    *product(["RMSprop", "RMSpropTF"], repeat=2),
    *((name, name) for name in TORCH_NPU_KEYS),
}


@pytest.mark.parametrize(("source", "target"), list(product(TORCH_NPU_KEYS, repeat=2)))
def test_states_of_another_optimizer(source, target):
    params, others = parameters(SHAPES), parameters(SHAPES)
    donor = getattr(co, source)(others, **CATALOG[source].typical, compile=False)
    advance(donor, others, 0, 2)
    optimizer = getattr(co, target)(params, **CATALOG[target].typical, compile=False)
    advance(optimizer, params, 0, 1)
    if (source, target) in RELATED:
        optimizer.load_state_dict(donor.state_dict())
        assert all(map(torch.isfinite, map(torch.sum, params)))
    else:
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(
            ValueError, match=f"group 0 of the checkpoint was saved by another optimizer than {target}: it has"
        ):
            optimizer.load_state_dict(donor.state_dict())
        assert_same(optimizer.state_dict(), before)
    advance(optimizer, params, 1, 3)
    assert all(bool(param.isfinite().all()) for param in params)


def test_sgd_without_momentum_refuses_the_states_of_another_optimizer():
    """SGD without momentum has no states, so only the hyperparameters of the groups show the mismatch."""
    params = parameters(SHAPES)
    donor = torch.optim.Adam(params)
    advance(donor, params, 0, 1)
    with pytest.raises(ValueError, match="saved by another optimizer than SGD"):
        co.SGD(params, compile=False).load_state_dict(donor.state_dict())


def test_an_error_of_a_hook_changes_nothing():
    params = parameters(SHAPES)
    optimizer = grouped(params)
    advance(optimizer, params, 0, 2)
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    saved["param_groups"][0]["lr"] = 9.0

    def refuse(opt, state_dict):
        raise RuntimeError("no")

    handle = optimizer.register_load_state_dict_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="no"):
        optimizer.load_state_dict(saved)
    assert_same(optimizer.state_dict(), before)
    handle.remove()
    optimizer.register_load_state_dict_pre_hook(lambda opt, state_dict: before)
    told = []
    optimizer.register_load_state_dict_post_hook(lambda opt: told.append(opt.param_groups[0]["lr"]))
    optimizer.load_state_dict(saved)
    assert told == [1e-3], "the hook's checkpoint was loaded"
