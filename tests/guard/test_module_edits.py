"""Edits of the structure of a watched module, one for each row of the table in docs/guard.md."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import compiled_optim as co
from tests.helpers import assert_close, params_of

from .module_edits import EDITS, Edit, Net
from .watching import kinds

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")


def backward(module, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in module.parameters():
        param.grad = torch.randn(param.shape, generator=generator)


def trained(edit: Edit, policy="recompile", compiled=False, make=co.AdamW):
    """Return a module and its optimizer after two steps."""
    torch.manual_seed(0)
    net = Net()
    edit.prepare(net)
    optimizer = make(net, lr=0.1, compile=compiled, on_realloc=policy)
    for seed in range(2):
        backward(net, seed)
        optimizer.step()
    return net, optimizer


def names_in(optimizer):
    return [name for group in optimizer.param_groups for name in group["param_names"]]


def expected_names(edit: Edit, before):
    return [new for name in before for new in edit.names.get(name, [name])]


def continued(net, names, states):
    """Return the result of a step of torch.optim over the parameters with these names, from states by name."""
    twins = [nn.Parameter(net.get_parameter(name).detach().clone()) for name in names]
    twin = torch.optim.AdamW(twins, lr=0.1, foreach=False)
    for name, param in zip(names, twins, strict=True):
        param.grad = net.get_parameter(name).grad.clone()
        if name in states:
            twin.state[param] = copy.deepcopy(states[name])
    twin.step()
    return dict(zip(names, twins, strict=True)), {
        name: twin.state[param] for name, param in zip(names, twins, strict=True)
    }


def states_in(optimizer):
    return {name: optimizer.state[param] for name, param in zip(names_in(optimizer), params_of(optimizer), strict=True)}


def check(net, optimizer, expected, states):
    """Compare names, parameters and states with those of torch.optim."""
    names = names_in(optimizer)
    assert names == list(expected)
    assert len({*names}) == len(names)
    assert [id(net.get_parameter(name)) for name in names] == [id(param) for param in params_of(optimizer)]
    assert_close(params_of(optimizer), list(expected.values()), 2e-6)
    assert {id(param) for param in optimizer.state} == {id(param) for param in params_of(optimizer)}
    for name, values in states_in(optimizer).items():
        assert int(values["step"]) == int(states[name]["step"]), name
        assert_close([values["exp_avg"]], [states[name]["exp_avg"]], 2e-6)


@pytest.mark.parametrize(
    ("name", "copied"), [(name, copied) for name in EDITS for copied in {False, EDITS[name].can_be_copied}]
)
def test_the_optimizer_follows(name, copied, compiled, caplog):
    edit = EDITS[name]
    net, optimizer = trained(edit, compiled=compiled)
    before = {
        id(param): (each, optimizer.state[param])
        for each, param in zip(names_in(optimizer), params_of(optimizer), strict=True)
    }
    edit.edit(net)
    known = {}
    for new, param in net.named_parameters(remove_duplicate=False):
        if id(param) in before and new not in edit.fresh:
            known[new] = before[id(param)][1]
    if copied:
        net, optimizer = copy.deepcopy((net, optimizer))
    backward(net, 2)
    names = expected_names(edit, [each for each, _ in before.values()])
    untouched = {new: net.get_parameter(new).detach().clone() for new in edit.added}
    expected, states = continued(net, names, known)
    with caplog.at_level(logging.WARNING, logger="compiled_optim"):
        optimizer.step()
    check(net, optimizer, expected, states)
    assert [int(states[new]["step"]) for new in edit.fresh] == [1] * len(edit.fresh)
    assert all(torch.equal(net.get_parameter(new), value) for new, value in untouched.items())
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.name == "compiled_optim" and record.levelno >= logging.WARNING
    ]
    changes = [kind for kind in edit.kinds if not (copied and kind == "storage")]  # a copy has other memory anyway
    assert len(lines) == bool(changes) + bool(edit.added)
    events = optimizer.explain().events
    assert len(events) == len(changes) + len(edit.added)
    for new in edit.added:
        assert any(event.startswith(f"parameter {new!r}: added to a watched module") for event in events)
        assert f"parameter {new!r}: added" in lines[-1]
        assert "add_param_group()" in lines[-1]


@pytest.mark.parametrize("name", EDITS)
def test_raise_refuses_what_the_table_says(name):
    edit = EDITS[name]
    net, optimizer = trained(edit, "raise")
    before = names_in(optimizer)
    edit.edit(net)
    backward(net, 2)
    if edit.kinds:
        with pytest.raises(co.ReallocationError) as error:
            optimizer.step()
        assert kinds(error) == list(edit.kinds)
        assert names_in(optimizer) == before
        optimizer.on_realloc = "recompile"
    optimizer.step()
    assert names_in(optimizer) == expected_names(edit, before)


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("make", [co.AdamW, torch.optim.AdamW], ids=["ours", "torch's"])
def test_a_checkpoint_saved_afterwards(name, make):
    """It is loaded into a new optimizer of the changed module, whose order of parameters may be another one."""
    edit = EDITS[name]
    net, optimizer = trained(edit)
    edit.edit(net)
    backward(net, 2)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["param_groups"][0]["param_names"] == names_in(optimizer)
    own = {id(param) for param in params_of(optimizer)}
    pairs = [(each, param) for each, param in net.named_parameters() if id(param) in own]
    if make is torch.optim.AdamW:  # which goes by position
        pairs.sort(key=lambda pair: names_in(optimizer).index(pair[0]))
    fresh = make(pairs, lr=0.1)
    fresh.load_state_dict(saved)
    assert {*names_in(fresh)} == {*names_in(optimizer)}
    for each, values in states_in(optimizer).items():
        loaded = fresh.state[net.get_parameter(each)]
        assert all(torch.equal(value, values[key]) for key, value in loaded.items())


def test_an_added_layer_is_stepped_once_it_is_in_a_group(compiled):
    net, optimizer = trained(EDITS["ModuleList.insert"], compiled=compiled)
    EDITS["ModuleList.insert"].edit(net)
    optimizer.add_param_group({"params": net.layers[0].named_parameters("layers.0"), "lr": 0.5})
    backward(net, 2)
    optimizer.step()
    assert optimizer.explain().events == ()
    assert names_in(optimizer)[0] == "layers.1.weight"
    assert names_in(optimizer)[-1] == "layers.0.weight"
    assert int(optimizer.state[net.layers[0].weight]["step"]) == 1
    net.layers[0].weight = nn.Parameter(torch.zeros(3, 3))
    backward(net, 3)
    optimizer.step()
    assert optimizer.param_groups[1]["params"] == [net.layers[0].weight]


def test_a_rename_is_followed_by_a_replacement(compiled):
    """``m.b = m.a; del m.a``, a step, then ``m.b = Parameter(...)``."""
    module = nn.Module()
    module.c, module.a = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = co.SGD(module, lr=1.0, compile=compiled, on_realloc="raise")
    module.b = module.a
    del module.a
    backward(module, 0)
    optimizer.step()
    assert names_in(optimizer) == ["c", "b"]
    assert optimizer.explain().events == ()
    module.b = nn.Parameter(torch.ones(2))
    with pytest.raises(co.ReallocationError, match=r"parameter 'b': replaced by a new object"):
        optimizer.step()
    optimizer.on_realloc = "recompile"
    module.b.grad = torch.ones(2)
    optimizer.step()
    assert module.b.tolist() == [0.0, 0.0]


def test_names_with_another_prefix_follow():
    """The optimizer got the names of the whole model, and watches a part of it or a wrapper."""
    net = Net()
    optimizer = co.SGD(net.named_parameters(), compile=False)
    optimizer.watch(net.layers)
    optimizer.watch(nn.ModuleDict({"module": net}))
    net.layers.insert(0, nn.Linear(3, 3, bias=False))
    net.tail = net.head
    del net.head
    backward(net, 0)
    optimizer.step()
    after = ["layers.1.weight", "layers.2.weight", "layers.3.weight", "seq.0.weight", "seq.1.weight"]
    assert names_in(optimizer) == [*after, "tail.weight", "tail.bias"]


def test_names_that_a_user_has_chosen_stay():
    net = Net()
    optimizer = co.SGD([("first", net.layers[0].weight), ("second", net.layers[1].weight)], compile=False)
    optimizer.watch(net)
    net.layers.insert(0, nn.Linear(3, 3, bias=False))
    net.layers[2].weight = nn.Parameter(torch.ones(3, 3))
    backward(net, 0)
    optimizer.step()
    assert names_in(optimizer) == ["first", "second"]


def test_a_parameter_that_was_never_the_optimizers_is_no_replacement(compiled):
    """A layer that belongs to no or another optimizer moves to the place of a removed one."""
    net = Net()
    optimizer = co.SGD(net.layers[0].parameters(), lr=1.0, compile=compiled)
    optimizer.watch(net)
    net.layers.pop(0)
    backward(net, 0)
    before = net.layers[0].weight.detach().clone()
    optimizer.step()
    assert params_of(optimizer) == []
    assert torch.equal(net.layers[0].weight, before)
    (event,) = optimizer.explain().events
    assert "removed from its module" in event


def test_lazy_layers_in_place_of_others():
    net = Net()
    optimizer = co.AdamW(net, compile=False)
    net.head = nn.LazyLinear(2)
    optimizer.step()
    net.head(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert int(optimizer.state[net.head.weight]["step"]) == 1
