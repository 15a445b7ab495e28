"""A watched module: parameters it replaces, drops, ties, unties or materialises, and modules converted in each way."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import compiled_optim as co
from tests.helpers import assert_close


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(net, *optimizers, steps=1, seed=0):
    torch.manual_seed(seed)
    first = next(net.parameters())
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        net(torch.randn(5, 3).to(first.device, first.dtype)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def held(optimizer):
    return [id(p) for group in optimizer.param_groups for p in group["params"]]


def kinds(error):
    return [change.kind for change in error.value.changes]


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
    optimizer.on_realloc = "recompile"  # the other way out the message names
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
    net[2].weight = nn.Parameter(torch.ones(2, 4))  # not the optimizer's
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
    one.bias, two.bias = None, one.bias  # handed over is not removed
    optimizer.on_realloc = "recompile"
    optimizer.step()
    assert held(optimizer) == [id(p) for p in (one.weight, two.bias, two.weight)]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


def test_tied_parameters(compiled):
    net = Tied()
    optimizer = co.AdamW(net, lr=0.1, compile=compiled)
    train(net, optimizer, steps=2)
    shared = net.embed.weight
    net.head.weight = nn.Parameter(torch.eye(3))  # untied: both are stepped from now on
    train(net, optimizer)
    assert held(optimizer) == [id(shared), id(net.head.weight)]
    assert [int(optimizer.state[p]["step"]) for p in net.parameters()] == [3, 1]
    net.head.weight = shared  # tied again: the other one goes
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
    # on a copy in double precision from the same point: torch
    twin_net.double().load_state_dict(net.state_dict())
    twin = torch.optim.AdamW(twin_net.parameters(), lr=0.1)
    twin.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    optimizer.step()  # no gradients: follows all the same
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
    """``.float()`` of a float32 module under "overwrite": new objects over the same memory."""
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
    """torch makes two of one; each goes on with the moments, in memory of its own."""
    net = Tied()
    optimizer = co.AdamW(net, lr=0.1, compile=compiled)
    train(net, optimizer)
    net.double()
    assert net.embed.weight is not net.head.weight
    train(net, optimizer)
    states = [optimizer.state[p] for p in net.parameters()]
    assert [int(state["step"]) for state in states] == [2, 2]
    assert states[0]["exp_avg"].data_ptr() != states[1]["exp_avg"].data_ptr()


def test_loading_model_and_optimizer_with_assigned_parameters(compiled):
    """``load_state_dict(assign=True)`` makes new parameters; a checkpoint loaded after it is theirs."""
    net = model()
    optimizer = co.AdamW(net, lr=0.1, compile=compiled)
    train(net, optimizer, steps=2)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    train(net, optimizer, seed=5)
    reference = [p.detach().clone() for p in net.parameters()]
    net.load_state_dict(saved[0], assign=True)
    optimizer.load_state_dict(saved[1])
    train(net, optimizer, seed=5)
    assert_close(list(net.parameters()), reference, 1e-6)
    assert int(optimizer.state[net[0].weight]["step"]) == 3


def test_a_checkpoint_that_does_not_fit_leaves_the_old_parameters(compiled):
    net = model()
    optimizer = co.AdamW(net, lr=0.1, compile=compiled)
    train(net, optimizer)
    before = held(optimizer), set(map(id, optimizer.state))
    net[0].weight = nn.Parameter(torch.ones(4, 3))
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(torch.optim.AdamW([nn.Parameter(torch.ones(1))]).state_dict())
    assert (held(optimizer), set(map(id, optimizer.state))) == before


def test_a_failing_step_adopts_nothing(compiled):
    net = model()
    optimizer = co.AdamW(net, lr=0.1, compile=compiled)
    train(net, optimizer)
    old = net[0].weight
    net[0].weight = nn.Parameter(torch.ones(4, 3))
    net.to(torch.float64)
    net[2].bias.grad = None
    net[2].bias.grad = torch.sparse_coo_tensor([[0]], [1.0], (2,), dtype=torch.float64)
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert old in optimizer.state
    assert id(old) in held(optimizer)
    assert optimizer.state[net[0].bias]["exp_avg"].dtype == torch.float32
    assert optimizer.explain().events == ()
    net[2].bias.grad = torch.ones(2, dtype=torch.float64)
    optimizer.step()
    assert held(optimizer) == [id(p) for p in net.parameters()]
    assert optimizer.state[net[0].bias]["exp_avg"].dtype == torch.float64


def test_copies_watch_the_copied_module(compiled):
    net, optimizer = copy.deepcopy((net := model(), co.AdamW(net, lr=0.1, compile=compiled, on_realloc="raise")))
    train(net, optimizer)
    assert held(optimizer) == [id(p) for p in net.parameters()]
    net[0].bias = None
    with pytest.raises(co.ReallocationError):
        optimizer.step()
    alone = copy.deepcopy(optimizer)
    alone.step()
    pickle.loads(pickle.dumps(optimizer)).step()


def test_adopted_parameters_keep_schedules_and_groups(compiled):
    net = model()
    groups = [{"params": net[0].parameters(), "lr": 0.1}, {"params": net[2].parameters(), "lr": 0.5}]
    optimizer = co.SGD(groups, compile=compiled)
    optimizer.watch(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(net, optimizer)
    net[2].weight = nn.Parameter(torch.ones(2, 4))
    scheduler.step()
    train(net, optimizer)
    assert optimizer.param_groups[1]["params"][0] is net[2].weight
    expected = 1 - 0.05 * net[2].weight.grad
    assert_close([net[2].weight], [expected], 1e-6)


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
