"""A watched module is converted in each way torch has, materialised or parametrized: the optimizer keeps its state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import compiled_optim as co
from tests.helpers import assert_close

from .watching import Tied, held, kinds, model, train


@pytest.mark.parametrize("policy", ["recompile", "raise"])
def test_lazy_modules(policy, compiled):
    net = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    optimizer = co.AdamW(net, compile=compiled, on_realloc=policy)
    optimizer.warmup()
    optimizer.step()
    for _ in range(3):
        train(net, optimizer)
    assert optimizer.explain().events == ()
    assert int(optimizer.state[net[0].weight]["step"]) == 3


def test_parameters_of_the_meta_device_that_get_memory():
    net = nn.Sequential(nn.Linear(3, 2, device="meta"))
    optimizer = co.AdamW(net, compile=False, on_realloc="raise")
    net.to_empty(device="cpu")
    nn.init.ones_(net[0].weight)
    nn.init.zeros_(net[0].bias)
    train(net, optimizer)
    assert optimizer.explain().events == ()


def test_parametrizations_keep_the_parameter(compiled):
    net = model()
    optimizer = co.AdamW(net, compile=compiled, on_realloc="raise")
    train(net, optimizer)
    nn.utils.parametrize.register_parametrization(net[0], "weight", nn.Identity())
    train(net, optimizer, steps=2)
    assert int(optimizer.state[net[0].parametrizations.weight.original]["step"]) == 3


CONVERSIONS = {
    "in place": lambda: None,
    "overwrite": lambda: torch.__future__.set_overwrite_module_params_on_conversion(True),
    "swap": lambda: torch.__future__.set_swap_module_params_on_conversion(True),
}


@pytest.fixture
def overwriting():
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


@pytest.fixture(params=CONVERSIONS)
def conversion(request):
    CONVERSIONS[request.param]()
    yield request.param
    torch.__future__.set_overwrite_module_params_on_conversion(False)
    torch.__future__.set_swap_module_params_on_conversion(False)


def test_a_converted_module_takes_its_moments_along(conversion, compiled):
    net, twin_net = model(), model()
    optimizer = co.AdamW(net, lr=0.1, compile=compiled)
    train(net, optimizer, steps=3)
    weight, before = net[0].weight, optimizer.state[net[0].weight]["exp_avg"].clone()
    net.double()
    assert (net[0].weight is weight) == (conversion != "overwrite")
    # reference: torch.optim on a double precision copy, from the same parameters and states
    twin_net.double().load_state_dict(net.state_dict())
    twin = torch.optim.AdamW(twin_net.parameters(), lr=0.1)
    twin.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    optimizer.step()  # a step without gradients converts the states too
    assert torch.equal(optimizer.state[net[0].weight]["exp_avg"], before.double()), "bit for bit"
    train(net, optimizer, steps=3, seed=1)
    train(twin_net, twin, steps=3, seed=1)
    assert_close(list(net.parameters()), list(twin_net.parameters()), 1e-12)
    assert int(optimizer.state[net[0].weight]["step"]) == 6
    events = optimizer.explain().events
    assert len(events) == 4
    assert all("dtype changed from torch.float32 to torch.float64" in event for event in events)


def test_a_converted_module_is_refused(conversion, compiled):
    net = model()
    optimizer = co.AdamW(net, lr=0.1, compile=compiled, on_realloc="raise")
    train(net, optimizer)
    net.double()
    with pytest.raises(co.ReallocationError) as error:
        optimizer.step()
    assert kinds(error) == ["dtype"] * 4


def test_overwritten_without_a_copy(conversion, compiled):
    """With "overwrite", ``.float()`` of a float32 module makes new parameter objects with the same memory."""
    net = model()
    optimizer = co.AdamW(net, lr=0.1, compile=compiled)
    train(net, optimizer)
    net.float()
    train(net, optimizer)
    assert held(optimizer) == [id(p) for p in net.parameters()]
    assert int(optimizer.state[net[0].weight]["step"]) == 2


def test_a_new_parameter_under_overwrite_starts_afresh(overwriting, compiled):
    net = model()
    optimizer = co.AdamW(net, lr=0.1, compile=compiled)
    train(net, optimizer)
    net[0].weight = nn.Parameter(torch.ones(4, 3))
    train(net, optimizer)
    assert int(optimizer.state[net[0].weight]["step"]) == 1


def test_tied_parameters_that_a_conversion_unties(overwriting, compiled):
    """torch makes two parameters of one. Each keeps the moments, in separate memory."""
    net = Tied()
    optimizer = co.AdamW(net, lr=0.1, compile=compiled)
    train(net, optimizer)
    net.double()
    assert net.embed.weight is not net.head.weight
    train(net, optimizer)
    states = [optimizer.state[p] for p in net.parameters()]
    assert [int(state["step"]) for state in states] == [2, 2]
    assert states[0]["exp_avg"].data_ptr() != states[1]["exp_avg"].data_ptr()
