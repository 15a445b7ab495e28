"""Tests of ``in_backward=True``. The reference is the ordinary loop of backward and step, with torch.optim or ours."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import compiled_optim as co
from compiled_optim.backward import BackwardSteps
from tests.helpers import assert_same_state

STEPS = 4


class Net(nn.Module):
    """A tied weight, a frozen layer, a layer that is used in every second iteration only, and a checkpointed one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen, self.rare, self.inner = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.frozen.requires_grad_(False)

    def forward(self, x, rarely=False):
        x = self.frozen(torch.tanh(self.first(x)))
        x = checkpoint(self.inner, x, use_reentrant=False)
        if rarely:
            x = self.rare(x)
        return self.last(torch.tanh(x))


def loss_of(net, step):
    torch.manual_seed(step)
    return net(torch.randn(5, 6), rarely=step % 2 == 1).square().mean()


def train(net, optimizer, scheduler=None, steps=range(STEPS)):
    for step in steps:
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def groups(net):
    biases = [param for name, param in net.named_parameters() if "bias" in name]
    weights = [param for name, param in net.named_parameters() if "weight" in name]
    return [{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": 0.02}]


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "Lamb", "AdamP"])
def test_the_same_bits_as_the_ordinary_loop(name, compiled):
    runs = []
    for in_backward in (True, False):
        net = Net()
        optimizer = getattr(co, name)(groups(net), lr=0.1, compile=compiled, in_backward=in_backward)
        train(net, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
        runs.append((net, optimizer))
    (net, optimizer), (twin, reference) = runs
    for param, expected in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(param, expected)
        assert param.grad is None
    assert_same_state(optimizer.state_dict(), reference.state_dict())


def test_the_ordinary_loop_of_torch(compiled):
    net, twin = Net(), Net()
    train(net, co.AdamW(net, lr=0.1, compile=compiled, in_backward=True))
    train(twin, torch.optim.AdamW(twin.parameters(), lr=0.1))
    for param, expected in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=2e-6, atol=1e-7)


def test_gradients_are_freed_during_backward():
    """At no time do more than two layers have gradients. A step of a whole model would need all."""
    layers = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))
    optimizer = co.AdamW(layers, in_backward=True)
    most = []
    for layer in layers:
        layer.register_full_backward_hook(
            lambda *_: most.append(sum(param.grad is not None for param in layers.parameters()))
        )
    layers(torch.randn(4, 16, requires_grad=True)).sum().backward()
    assert max(most) <= 2
    assert all(param.grad is None for param in layers.parameters())
    optimizer.step()


def test_accumulation(compiled):
    """Gradients of three backward passes, one of which reaches a layer that the last one does not reach."""
    net, twin = Net(), Net()
    optimizer, reference = co.AdamW(net, compile=compiled, in_backward=True), torch.optim.AdamW(twin.parameters())
    for start in (0, 3):
        with optimizer.accumulate():
            loss_of(net, start + 1).backward()
            loss = loss_of(net, start)
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        other = loss_of(twin, start)
        for each in (loss_of(twin, start + 1), other, other):
            each.backward(retain_graph=True)
        reference.step()
        reference.zero_grad()
    for param, expected in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=2e-6, atol=1e-7)
    assert optimizer.state[net.rare.weight]["step"] == 2


def test_the_number_of_calls_does_not_grow_with_the_model(monkeypatch):
    """Each call checks all parameters, so a call for each parameter would take quadratic time."""
    params = [nn.Parameter(torch.ones(3)) for _ in range(300)]
    optimizer = co.SGD(params, lr=1.0, in_backward=True, compile=False)
    calls, flush = [], BackwardSteps._flush
    monkeypatch.setattr(BackwardSteps, "_flush", lambda self, given: (calls.append(len(given)), flush(self, given)))
    torch.stack(params).sum().backward()
    optimizer.step()
    assert sum(calls) == len(params)
    assert len([count for count in calls if count]) <= 40
    assert all(torch.equal(param, torch.zeros(3)) for param in params)


def test_accumulate_without_in_backward():
    net = Net()
    optimizer = co.AdamW(net)
    with optimizer.accumulate():
        loss_of(net, 0).backward()
    assert net.inner.weight.grad is not None


def test_a_step_without_backward_is_refused(compiled):
    net = Net()
    optimizer = co.AdamW(net, compile=compiled, in_backward=True)
    with pytest.raises(RuntimeError, match="no backward since the last step"):
        optimizer.step()
    train(net, optimizer, steps=range(1))
    with pytest.raises(RuntimeError, match="no backward since the last step"):
        optimizer.step()


def test_a_second_backward_is_refused(compiled):
    net = Net()
    optimizer = co.AdamW(net, compile=compiled, in_backward=True)
    loss_of(net, 0).backward()
    with pytest.raises(RuntimeError, match="gets a second gradient in this iteration"):
        loss_of(net, 0).backward()
    optimizer.zero_grad()
    train(net, optimizer, steps=range(1))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("in backward")


def test_a_backward_that_fails_is_reported(compiled):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = co.AdamW(net, compile=compiled, in_backward=True)
    with pytest.raises(KeyError):
        net[1](Fails.apply(net[0](torch.ones(1, 4)))).sum().backward()
    with pytest.raises(RuntimeError, match=r"has stepped . of 4 parameters.*but not parameter '0\.weight'"):
        optimizer.step()
    optimizer.zero_grad()
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def test_a_step_that_fails_during_backward(compiled):
    """The error of the guard comes out of backward. Nothing of that call is updated."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = co.AdamW(net, compile=compiled, in_backward=True, on_realloc="raise")
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    net[1].weight.data = net[1].weight.data.clone()
    before = net[1].weight.detach().clone()
    with pytest.raises(co.ReallocationError):
        net(torch.ones(1, 4)).sum().backward()
    assert torch.equal(net[1].weight, before)
    with pytest.raises(RuntimeError, match="backward did not finish"):
        optimizer.step()


def test_clipping_by_the_norm_of_all_gradients_is_refused():
    net = Net()
    for make in (
        lambda: co.AdamW(net, in_backward=True, max_grad_norm=1.0),
        lambda: co.BertAdam(net, in_backward=True),
        lambda: co.Lamb(net, use_global_grad_norm=True, in_backward=True),
    ):
        with pytest.raises(ValueError, match="cannot clip by the norm of all gradients"):
            make()
    optimizer = co.AdamW(net, in_backward=True)
    optimizer.max_grad_norm = 1.0
    with pytest.raises(ValueError, match="cannot clip"):
        loss_of(net, 0).backward()


def test_grad_scaler_is_refused():
    net = Net()
    optimizer = co.AdamW(net, in_backward=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(net, 0)).backward()
    with pytest.raises(RuntimeError, match="does not support GradScaler"):
        scaler.step(optimizer)


def test_a_replaced_parameter_is_followed(compiled):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = co.AdamW(net, compile=compiled, in_backward=True)
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    net[0].weight = nn.Parameter(torch.ones(4, 4))
    for count in (1, 2):
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        assert optimizer.state[net[0].weight]["step"] == count
        assert net[0].weight.grad is None
    assert optimizer.state[net[1].weight]["step"] == 3


def test_copies_and_pickles_step_in_backward(compiled):
    net = Net()
    optimizer = co.AdamW(net, compile=compiled, in_backward=True)
    train(net, optimizer, steps=range(1))
    copied = copy.deepcopy((net, optimizer))
    loaded = pickle.loads(pickle.dumps((net, optimizer)))
    for each, own in ((net, optimizer), copied, loaded):
        train(each, own, steps=range(1, 3))
    for other, _ in (copied, loaded):
        for param, expected in zip(other.parameters(), net.parameters(), strict=True):
            assert torch.equal(param, expected)


def test_the_last_optimizer_steps():
    """A second optimizer takes the parameters over, even if the first one still exists."""
    net, twin = Net(), Net()
    first = co.SGD(net, lr=0.1, in_backward=True)
    train(net, co.SGD(net, lr=0.1, in_backward=True))
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
    for param, expected in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=2e-6, atol=1e-7)
    assert not first.state


def test_hooks_of_the_step_and_closures():
    net = Net()
    optimizer = co.AdamW(net, in_backward=True)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))

    def closure():
        loss = loss_of(net, 0)
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert seen == ["post"]


def test_loading_a_checkpoint_begins_a_new_iteration():
    """Also after a backward that failed: what it has left is dropped."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = co.AdamW(net, compile=False, in_backward=True)
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    weights, saved = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
    runs = []
    for fails in (False, True):
        if fails:
            with pytest.raises(KeyError):
                net[1](Fails.apply(net[0](torch.ones(1, 4)))).sum().backward()
            net[0].weight.grad = torch.ones(4, 4)  # as an error in the step of this parameter leaves it
        net.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(saved))
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        runs.append([param.detach().clone() for param in net.parameters()])
    assert all(map(torch.equal, *runs))


def test_a_checkpoint_that_clips_is_refused_before_anything_changes():
    net, twin = nn.Linear(4, 4), nn.Linear(4, 4)
    clips = co.BertAdam(twin, lr=0.1, max_grad_norm=1.0, compile=False)
    optimizer = co.BertAdam(net, lr=0.2, max_grad_norm=-1, compile=False, in_backward=True)
    with pytest.raises(ValueError, match="cannot clip by the norm of all gradients"):
        optimizer.load_state_dict(clips.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.2
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def test_a_group_that_clips_is_refused_and_not_kept():
    net = nn.Linear(4, 4)
    optimizer = co.BertAdam([net.weight], lr=0.1, max_grad_norm=-1, compile=False, in_backward=True)
    with pytest.raises(ValueError, match="cannot clip by the norm of all gradients"):
        optimizer.add_param_group({"params": [net.bias], "max_grad_norm": 1.0})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [net.bias]})
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("steps", [0, 2])
def test_an_optimizer_that_is_replaced_dies_at_once(steps):
    """Its hooks must not step parameters that another optimizer steps, until the garbage collector runs."""
    net = Net()
    gc.disable()
    try:
        optimizer = co.AdamW(net, compile=False, in_backward=True)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        train(net, optimizer, scheduler, steps=range(steps))
        found = weakref.ref(optimizer)
        del scheduler
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        assert found() is None
        loss_of(net, 0).backward()
        assert net.first.weight.grad is not None
    finally:
        gc.enable()


def test_parameters_that_are_swapped():
    """``module.double()`` may do so. autograd does not call the hooks in the iteration after it."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = co.AdamW(net, compile=False, in_backward=True)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for _ in range(2):
            net(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        net.double()
        for _ in range(2):
            net(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
            optimizer.step()
            assert all(param.grad is None for param in net.parameters())
        net(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        assert all(param.grad is None for param in net.parameters())
        optimizer.step()
        assert optimizer.state[net[0].weight]["step"] == 5
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_an_optimizer_removes_only_its_own_hooks():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first, second = (co.SGD(net, lr=0.1, compile=False, in_backward=True) for _ in range(2))
    net[0].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="no backward since"):
        first.step()
    net(torch.ones(1, 4)).sum().backward()
    second.step()
    del first
    before = net[1].weight.detach().clone()
    net(torch.ones(1, 4)).sum().backward()
    assert not torch.equal(net[1].weight, before)
    second.step()


def test_compare_eager_is_refused():
    net = Net()
    optimizer = co.AdamW(net, in_backward=True)
    with pytest.raises(RuntimeError, match="in_backward=False"), optimizer.compare_eager():
        pass


@pytest.mark.parametrize("dense_steps", [0, 1])
def test_a_sparse_gradient_is_refused(dense_steps, compiled):
    """With the message of the ordinary loop, which names the parameter and a remedy; also with a plan."""
    net = nn.Embedding(5, 3)
    optimizer = co.AdamW(net, compile=compiled, in_backward=True)
    for _ in range(dense_steps):
        net(torch.tensor([1])).sum().backward()
        optimizer.step()
    net.sparse = True
    with pytest.raises(RuntimeError, match=r"does not support sparse gradients.*'weight'"):
        net(torch.tensor([1])).sum().backward()
    assert not dense_steps or optimizer.state[net.weight]["step"] == dense_steps
