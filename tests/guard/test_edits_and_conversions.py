"""Edits of a watched module together with conversions into new objects, or with new groups. The fuzz found them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import compiled_optim as co
from tests.helpers import assert_close, params_of

from .module_edits import Net, linear, rename_parameter
from .test_module_edits import backward, names_in, states_in
from .watching import kinds


@pytest.fixture(autouse=True)
def _overwriting():
    """Let conversions make new objects, as they do between the CPU and some devices."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


def backward_in_double(net, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in net.parameters():
        param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)


def trained(policy="recompile"):
    torch.manual_seed(0)
    net = Net()
    optimizer = co.AdamW(net, lr=0.1, compile=False, on_realloc=policy)
    backward(net, 0)
    optimizer.step()
    return net, optimizer


EDITS = {
    "rename": (rename_parameter, "head.kernel"),
    "parametrize": (
        lambda net: parametrize.register_parametrization(net.head, "weight", nn.Identity()),
        "head.parametrizations.weight.original",
    ),
    "prune": (lambda net: prune.l1_unstructured(net.head, "weight", 0.5), "head.weight_orig"),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("edited_first", [True, False])
def test_a_parameter_is_renamed_and_converted(edit, edited_first):
    """Its state goes on, as that of torch's optimizer does for a parameter that is converted in place."""
    net, optimizer = trained()
    twin = nn.Parameter(net.head.weight.detach().double())
    reference = torch.optim.AdamW([twin], lr=0.1)
    reference.state[twin] = copy.deepcopy(optimizer.state[net.head.weight])
    for moment in ("exp_avg", "exp_avg_sq"):
        reference.state[twin][moment] = reference.state[twin][moment].double()
    change, name = EDITS[edit]
    changes = [change, nn.Module.double]
    for each in changes if edited_first else reversed(changes):
        each(net)
    backward_in_double(net, 1)
    twin.grad = net.get_parameter(name).grad.clone()
    optimizer.step()
    reference.step()
    assert_close([net.get_parameter(name)], [twin], 1e-12)
    assert int(states_in(optimizer)[name]["step"]) == 2
    assert names_in(optimizer).count(name) == 1
    assert len(names_in(optimizer)) == 7


def test_parameters_without_names_are_converted():
    net = Net()
    optimizer = co.AdamW(net.parameters(), lr=0.1, compile=False)
    optimizer.watch(net)
    backward(net, 0)
    optimizer.step()
    rename_parameter(net)
    net.double()
    backward_in_double(net, 1)
    optimizer.step()
    assert {id(param) for param in params_of(optimizer)} == {id(param) for param in net.parameters()}
    assert [int(optimizer.state[param]["step"]) for param in net.parameters()] == [2] * 7


def test_a_lazy_parameter_gets_memory_and_is_converted():
    net = nn.Sequential(nn.LazyLinear(2))
    optimizer = co.AdamW(net, lr=0.1, compile=False, on_realloc="raise")
    net(torch.ones(1, 3))
    net.double()
    backward_in_double(net, 0)
    optimizer.step()
    assert [id(param) for param in params_of(optimizer)] == [id(param) for param in net.parameters()]
    assert optimizer.explain().events == ()


def test_the_error_has_the_new_name():
    net, optimizer = trained("raise")
    net.layers.insert(0, linear())
    net.double()
    with pytest.raises(co.ReallocationError) as error:
        optimizer.step()
    assert kinds(error) == ["dtype"] * 7
    assert {change.parameter for change in error.value.changes} >= {f"parameter 'layers.{i}.weight'" for i in (1, 2, 3)}


def test_a_foreign_parameter_is_converted_and_takes_the_name_of_a_removed_one():
    """It was added to the module but not to the optimizer, and is not mistaken for a new parameter."""
    net, optimizer = trained()
    net.layers.append(linear())
    optimizer.step()
    for _ in range(3):
        net.layers.pop(0)
    net.double()
    before = net.layers[0].weight.detach().clone()
    backward_in_double(net, 1)
    optimizer.step()
    assert names_in(optimizer) == ["seq.0.weight", "seq.1.weight", "head.weight", "head.bias"]
    assert torch.equal(net.layers[0].weight, before)


@pytest.mark.parametrize("policy", ["recompile", "raise"])
def test_a_parameter_is_added_to_a_group_and_removed_before_the_next_step(policy):
    net, optimizer = trained(policy)
    net.layers.append(linear())
    optimizer.add_param_group({"params": net.layers[3].named_parameters("layers.3")})
    net.layers.pop(3)
    if policy == "raise":
        with pytest.raises(co.ReallocationError, match=r"parameter 'layers.3.weight': removed"):
            optimizer.step()
        return
    optimizer.step()
    assert optimizer.param_groups[1]["params"] == []
    assert any("'layers.3.weight': removed" in event for event in optimizer.explain().events)


def test_a_parameter_that_moves_after_it_was_added_to_a_group():
    """Its name and its place are those at the time when it was added, not those of an earlier step."""
    net, optimizer = trained()
    net.layers.insert(0, linear())
    optimizer.step()  # which notices a parameter that the optimizer does not have
    net.layers = nn.ModuleList(reversed(net.layers))
    optimizer.add_param_group({"params": net.layers[3].named_parameters("layers.3")})
    net.layers.insert(0, linear())
    optimizer.step()
    assert optimizer.param_groups[1]["param_names"] == ["layers.4.weight"]
    net.layers[4] = linear()
    optimizer.step()
    assert optimizer.param_groups[1]["params"] == [net.layers[4].weight]


def test_a_parameter_is_converted_again_after_it_was_added_to_a_group():
    net, optimizer = trained()
    net.layers.append(linear())
    optimizer.step()
    net.double()
    optimizer.add_param_group({"params": net.layers[3].named_parameters("layers.3")})
    net.float()
    optimizer.step()
    assert optimizer.param_groups[1]["params"] == [net.layers[3].weight]
    assert {id(param) for param in params_of(optimizer)} == {id(param) for param in net.parameters()}
