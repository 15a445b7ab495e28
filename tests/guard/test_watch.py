"""A watched module replaces, removes, ties or unties parameters: the optimizer follows, or refuses to step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import compiled_optim as co
from tests.helpers import assert_close

from .watching import Tied, held, kinds, model, train


def test_a_replaced_parameter_is_adopted_with_fresh_state(compiled):
    net = model()
    optimizer = co.AdamW(net, lr=0.1, compile=compiled)
    train(net, optimizer, steps=3)
    old, other = net[2].weight, net[0].weight
    net[2].weight = nn.Parameter(torch.ones(2, 4))
    train(net, optimizer)
    assert held(optimizer) == [id(p) for p in net.parameters()]
    assert old not in optimizer.state
    assert int(optimizer.state[net[2].weight]["step"]) == 1
    assert int(optimizer.state[other]["step"]) == 4
    (event,) = optimizer.explain().events
    assert event.startswith("parameter '2.weight': replaced by a new object")
    twin = torch.optim.AdamW([nn.Parameter(torch.ones(2, 4))], lr=0.1)
    twin.param_groups[0]["params"][0].grad = net[2].weight.grad
    twin.step()
    assert_close([net[2].weight], twin.param_groups[0]["params"], 2e-6)


def test_a_new_shape_and_a_new_submodule(compiled):
    net = model()
    optimizer = co.AdamW(net, lr=0.1, compile=compiled)
    train(net, optimizer)
    net[2] = nn.Linear(4, 7)
    train(net, optimizer)
    assert held(optimizer) == [id(p) for p in net.parameters()]
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert optimizer.state[net[2].bias]["exp_avg"].shape == (7,)


@pytest.mark.parametrize("how", ["None", "del", "submodule"])
def test_a_removed_parameter_is_dropped_and_comes_back(how, compiled):
    net = model()
    optimizer = co.AdamW(net, lr=0.1, compile=compiled)
    train(net, optimizer)
    old = list(net[2].parameters())
    if how == "None":
        net[2].bias = None
    elif how == "del":
        del net[2].bias
        net[2].forward = lambda x: nn.functional.linear(x, net[2].weight)
    else:
        net[2] = nn.Identity()
    train(net, optimizer)
    assert held(optimizer) == [id(p) for p in net.parameters()]
    assert old[1] not in optimizer.state
    assert len(optimizer.param_groups[0]["param_names"]) == len(optimizer.param_groups[0]["params"])
    assert any("'2.bias': removed from its module" in event for event in optimizer.explain().events)
    if how == "submodule":
        net[2] = nn.Linear(4, 2)
    else:
        net[2].bias = nn.Parameter(torch.zeros(2))
    train(net, optimizer)
    assert set(held(optimizer)) == {id(p) for p in net.parameters()}
    assert any("'2.bias': set again" in event for event in optimizer.explain().events)


def test_raise_leaves_everything_and_can_be_mended(compiled):
    net = model()
    optimizer = co.AdamW(net, lr=0.1, compile=compiled, on_realloc="raise")
    train(net, optimizer)
    weight, bias = net[2].weight, net[2].bias
    before = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    net[2].weight, net[2].bias = nn.Parameter(torch.ones(2, 4)), None
    for _ in range(2):
        with pytest.raises(co.ReallocationError) as error:
            optimizer.step()
        assert kinds(error) == ["replaced", "removed"]
    net[2].weight, net[2].bias = weight, bias
    after = net.state_dict(), optimizer.state_dict()
    for old, new in zip(before[0].values(), after[0].values(), strict=True):
        assert torch.equal(old, new)
    assert str(before[1]) == str(after[1])
    train(net, optimizer)
    assert int(optimizer.state[weight]["step"]) == 2
    net[2].weight = nn.Parameter(torch.ones(2, 4))
    optimizer.on_realloc = "recompile"  # the other remedy in the message
    train(net, optimizer)
    assert net[2].weight in optimizer.state


def test_before_the_first_step(compiled):
    net = model()
    optimizer = co.AdamW(net, compile=compiled, on_realloc="raise")
    net.double()
    net[0].bias = nn.Parameter(torch.zeros(4).double())
    with pytest.raises(co.ReallocationError) as error:
        optimizer.step()
    assert sorted(kinds(error)) == ["dtype", "dtype", "dtype", "replaced"]


def test_only_watched_modules_and_held_parameters_count(compiled):
    net = model()
    optimizer = co.AdamW(net[0].parameters(), compile=compiled, on_realloc="raise")
    train(net, optimizer)
    optimizer.watch(net)
    optimizer.watch(net)
    net[2].weight = nn.Parameter(torch.ones(2, 4))  # not a parameter of the optimizer
    train(net, optimizer)
    net[0].bias = None
    with pytest.raises(co.ReallocationError, match=r"parameter '0\.bias'"):
        optimizer.step()


def test_watch_takes_modules_only():
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, but got generator"):
        co.AdamW(model()).watch(model().parameters())


def test_several_modules_are_told_apart(compiled):
    one, two = nn.Linear(3, 2), nn.Bilinear(3, 3, 2)
    optimizer = co.AdamW([*one.parameters(), *two.parameters()], compile=compiled, on_realloc="raise")
    optimizer.watch(one)
    optimizer.watch(two)
    one.weight, two.bias = nn.Parameter(torch.ones(2, 3)), None
    with pytest.raises(co.ReallocationError) as error:
        optimizer.step()
    assert [c.parameter for c in error.value.changes] == ["parameter 'Linear.weight'", "parameter 'Bilinear.bias'"]
    one.bias, two.bias = None, one.bias  # moved to another module, so not removed
    optimizer.on_realloc = "recompile"
    optimizer.step()
    assert held(optimizer) == [id(p) for p in (one.weight, two.bias, two.weight)]


def test_tied_parameters(compiled):
    net = Tied()
    optimizer = co.AdamW(net, lr=0.1, compile=compiled)
    train(net, optimizer, steps=2)
    shared = net.embed.weight
    net.head.weight = nn.Parameter(torch.eye(3))  # untied: both are stepped from now on
    train(net, optimizer)
    assert held(optimizer) == [id(shared), id(net.head.weight)]
    assert [int(optimizer.state[p]["step"]) for p in net.parameters()] == [3, 1]
    net.head.weight = shared  # tied again: the other parameter is dropped
    train(net, optimizer)
    assert held(optimizer) == [id(shared)]
    assert int(optimizer.state[shared]["step"]) == 4
    net.head.weight = net.embed.weight = nn.Parameter(torch.eye(3))  # replaced in both places at once
    train(net, optimizer)
    assert held(optimizer) == [id(net.embed.weight)]
    assert [event.split(":")[0] for event in optimizer.explain().events] == [
        "parameter 'head.weight'",
        "parameter 'head.weight'",
        "parameter 'embed.weight'",
    ]


def test_one_of_two_names_removed_is_no_event(compiled):
    net = Tied()
    optimizer = co.AdamW(net, compile=compiled, on_realloc="raise")
    train(net, optimizer)
    net.head = nn.Identity()
    train(net, optimizer)


def test_a_parameter_that_comes_back_to_a_module_that_had_no_other():
    model = nn.Sequential(nn.Linear(2, 2), nn.Module())
    model[1].scale = nn.Parameter(torch.ones(3))
    optimizer = co.SGD(model, lr=1.0, compile=False)
    del model[1].scale
    optimizer.step()
    model[1].scale = nn.Parameter(torch.ones(3))
    model[1].scale.grad = torch.ones(3)
    optimizer.step()
    assert model[1].scale.tolist() == [0.0] * 3
