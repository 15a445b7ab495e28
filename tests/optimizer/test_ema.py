"""Tests of ``ema_decay``. The reference is torch's ``AveragedModel`` beside torch.optim."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import compiled_optim as co
from catalog import CATALOG
from tests.helpers import assert_same_state, gradients

DECAY = 0.9


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def train(net, optimizer, average=None, steps=range(6)):
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        net(torch.randn(4, 6).to(net[0].weight)).square().mean().backward()
        optimizer.step()
        if average is not None:
            average.update_parameters(net)


def averages(net, optimizer):
    return [optimizer.state[param]["ema"] for param in net.parameters()]


def assert_near(some, others, **tolerance):
    for actual, expected in zip(some, others, strict=True):
        torch.testing.assert_close(actual.detach(), expected.detach(), **{"rtol": 2e-6, "atol": 1e-7, **tolerance})


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
def test_the_average_is_that_of_torch(name, compiled):
    """In float64, because RMSprop amplifies rounding errors."""
    net, twin = model().double(), model().double()
    optimizer = getattr(co, name)(net, lr=0.05, compile=compiled, ema_decay=DECAY)
    reference = getattr(torch.optim, name)(twin.parameters(), lr=0.05)
    average = AveragedModel(twin, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    train(net, optimizer)
    train(twin, reference, average)
    assert_near(net.parameters(), twin.parameters(), rtol=1e-12, atol=0)
    assert_near(averages(net, optimizer), average.module.parameters(), rtol=1e-12, atol=1e-14)
    assert_near(optimizer.ema_state_dict().values(), average.module.state_dict().values())
    assert list(optimizer.ema_state_dict()) == list(average.module.state_dict())


@pytest.mark.parametrize("name", ["Lamb", "AdamP", "Adan", "Lion"])
def test_any_rule_has_an_average(name, compiled):
    """The weights are those without an average; the average is computed from them."""
    net, twin = model(), model()
    optimizer = getattr(co, name)(net, lr=0.05, compile=compiled, ema_decay=DECAY)
    reference = getattr(co, name)(twin, lr=0.05, compile=compiled)
    average = AveragedModel(twin, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    train(net, optimizer)
    train(twin, reference, average)
    assert_near(net.parameters(), twin.parameters())
    assert_near(averages(net, optimizer), average.module.parameters())


def test_groups_have_their_own_decays(compiled):
    net = model()
    groups = [{"params": net[0].parameters(), "ema_decay": 0.5}, {"params": net[2].parameters()}]
    optimizer = co.AdamW(groups, lr=0.05, compile=compiled)
    expected = None
    for step in range(4):
        train(net, optimizer, steps=[step])
        weight = net[0].weight.detach().clone()
        expected = weight if expected is None else 0.5 * expected + 0.5 * weight
    torch.testing.assert_close(optimizer.state[net[0].weight]["ema"], expected)
    assert "ema" not in optimizer.state[net[2].weight]


def test_the_warm_up_and_a_scheduled_decay(compiled):
    net = model()
    optimizer = co.AdamW(net, lr=0.05, compile=compiled, ema_decay=0.99, ema_warmup=True)
    expected = None
    for step in range(1, 6):
        optimizer.param_groups[0]["ema_decay"] = 0.99 if step < 5 else 0.1
        train(net, optimizer, steps=[step])
        decay = 0.0 if step == 1 else min(optimizer.param_groups[0]["ema_decay"], step / (step + 9))
        weight = net[0].weight.detach().double()
        expected = weight if expected is None else decay * expected + (1 - decay) * weight
    torch.testing.assert_close(optimizer.state[net[0].weight]["ema"].double(), expected, rtol=1e-6, atol=1e-7)
    assert optimizer.explain().recompiles == 0


def test_the_context_swaps_the_averages_in_and_out(compiled):
    net = model()
    optimizer = co.AdamW(net, lr=0.05, compile=compiled, ema_decay=DECAY)
    with pytest.raises(RuntimeError, match="there is no average yet"), optimizer.ema():
        pass
    train(net, optimizer)
    weights = [param.detach().clone() for param in net.parameters()]
    saved = copy.deepcopy(optimizer.state_dict())
    with optimizer.ema():
        assert_near(net.parameters(), averages(net, optimizer), rtol=0, atol=0)
        with pytest.raises(RuntimeError, match="inside ema"):
            optimizer.step()
    assert_near(net.parameters(), weights, rtol=0, atol=0)
    with pytest.raises(KeyError), optimizer.ema():
        raise KeyError
    assert_near(net.parameters(), weights, rtol=0, atol=0)
    assert_same_state(optimizer.state_dict(), saved)
    train(net, optimizer)
    assert not optimizer.explain().events


def test_low_precision_weights_have_a_float32_average(compiled):
    """In bfloat16 an average with a decay of 0.999 would not move at all."""
    param = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = co.SGD([param], lr=1.0, compile=compiled, ema_decay=0.999)
    for _ in range(20):
        param.grad = torch.full_like(param, 0.25)
        optimizer.step()
    average = optimizer.state[param]["ema"]
    assert average.dtype == torch.float32
    assert param[0] == -4.0
    expected = 0.75
    for step in range(1, 20):
        expected = 0.999 * expected + 0.001 * (0.75 - 0.25 * step)
    torch.testing.assert_close(average, torch.full((64,), expected))


def test_a_cast_keeps_the_average_in_float32(compiled):
    net = model()
    optimizer = co.AdamW(net, lr=0.05, compile=compiled, ema_decay=DECAY)
    train(net, optimizer)
    before = [average.clone() for average in averages(net, optimizer)]
    net.bfloat16()
    optimizer.zero_grad()
    net(torch.ones(1, 6, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    for average, old in zip(averages(net, optimizer), before, strict=True):
        assert average.dtype == torch.float32
        torch.testing.assert_close(average, old, rtol=0.2, atol=0.02)


def test_checkpoints_copies_and_pickles(compiled):
    net = model()
    optimizer = co.AdamW(net, lr=0.05, compile=compiled, ema_decay=DECAY)
    train(net, optimizer, steps=range(3))
    twin = copy.deepcopy(net)
    resumed = co.AdamW(twin, lr=0.05, compile=compiled, ema_decay=DECAY)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    others = [(twin, resumed), copy.deepcopy((net, optimizer)), pickle.loads(pickle.dumps((net, optimizer)))]
    train(net, optimizer, steps=range(3, 6))
    for other, own in others:
        train(other, own, steps=range(3, 6))
        assert_near(averages(other, own), averages(net, optimizer), rtol=0, atol=0)


def test_a_checkpoint_of_torch_starts_the_average(compiled):
    """A checkpoint without averages loads; the average starts from the loaded weights."""
    net, twin = model(), model()
    reference = torch.optim.AdamW(twin.parameters(), lr=0.05)
    train(twin, reference, steps=range(3))
    net.load_state_dict(twin.state_dict())
    optimizer = co.AdamW(net, lr=0.05, compile=compiled, ema_decay=DECAY)
    optimizer.load_state_dict(reference.state_dict())
    old = net[0].weight.detach().clone()
    train(net, optimizer, steps=[3])
    expected = DECAY * old + (1 - DECAY) * net[0].weight.detach()
    torch.testing.assert_close(optimizer.state[net[0].weight]["ema"], expected)
    reference.load_state_dict(optimizer.state_dict())  # and back


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(ValueError, match="Invalid ema_decay value"):
        co.AdamW(model(), ema_decay=decay)


@pytest.mark.parametrize("name", ["SGD", "Lion"])
def test_the_warm_up_of_rules_that_count_no_steps(name, compiled):
    """They count steps then. torch's average has the same decays, in a function that counts its calls."""
    net, twin = model(), model()
    optimizer = getattr(co, name)(net, lr=0.05, compile=compiled, ema_decay=DECAY, ema_warmup=True)
    reference = getattr(torch.optim, name, getattr(co, name))(twin.parameters(), lr=0.05)

    def average_step(averaged, current, steps_before):  # not called in the first step: torch copies the weights then
        step = int(steps_before) + 1
        torch._foreach_lerp_(averaged, current, 1 - min(DECAY, step / (step + 9)))

    average = AveragedModel(twin, multi_avg_fn=average_step)
    train(net, optimizer, steps=range(4))
    train(twin, reference, average, steps=range(4))
    # a copy and a checkpoint go on counting
    net, optimizer = copy.deepcopy((net, optimizer))
    fresh = getattr(co, name)(net, lr=0.05, compile=compiled, ema_decay=DECAY, ema_warmup=True)
    fresh.load_state_dict(optimizer.state_dict())
    train(net, fresh, steps=range(4, 8))
    train(twin, reference, average, steps=range(4, 8))
    assert_near(net.parameters(), twin.parameters())
    assert_near(averages(net, fresh), average.module.parameters())
    assert int(fresh.state[net[0].weight]["step"]) == 8
    assert "step" not in reference.state[twin[0].weight]


@pytest.mark.parametrize(
    ("name", "options"), [("AdamW", {}), ("SGD", {}), ("Adafactor", {}), ("Lamb", {}), ("AdamP", {"delta": 2.0})]
)
def test_clipping_each_parameter_by_its_own_norm(name, options, compiled):
    """Rules with sums over tensors sum the clipped gradients."""
    params = [torch.nn.Parameter(param.detach().double()) for param in model().parameters()]
    twins = [torch.nn.Parameter(param.detach().clone()) for param in params]
    optimizer = getattr(co, name)(params, lr=0.05, **options, compile=compiled, max_grad_norm_per_parameter=0.5)
    reference = CATALOG[name].reference(twins, lr=0.05, **options)
    for grads in gradients(params, 5):
        for param, twin, grad in zip(params, twins, grads, strict=True):
            param.grad, twin.grad = grad, grad.clone()
            nn.utils.clip_grad_norm_([twin], 0.5)
        optimizer.step()
        reference.step()
    assert_near(params, twins, rtol=1e-10)


def test_a_step_inside_a_nested_context_is_refused():
    net = model()
    optimizer = co.AdamW(net, lr=0.05, compile=False, ema_decay=DECAY)
    train(net, optimizer)
    with optimizer.ema():
        with optimizer.ema():
            pass
        with pytest.raises(RuntimeError, match="inside ema"):
            optimizer.step()
    optimizer.step()


def test_a_backward_that_steps_inside_the_context_is_refused():
    """Nothing is stepped: neither the averages that are in the parameters, nor the weights."""
    net = model()
    optimizer = co.AdamW(net, lr=0.05, compile=False, ema_decay=DECAY, in_backward=True)
    train(net, optimizer)
    weights, before = [param.detach().clone() for param in net.parameters()], averages(net, optimizer)
    before = [average.clone() for average in before]
    with optimizer.ema():
        with pytest.raises(RuntimeError, match="inside ema"):
            net(torch.ones(4, 6)).sum().backward()
        assert_near(net.parameters(), before, rtol=0, atol=0)
    assert_near(net.parameters(), weights, rtol=0, atol=0)
    optimizer.zero_grad()
    train(net, optimizer)


@pytest.mark.parametrize("convert", [lambda net: net.double().float(), lambda net: net.double()], ids=["twice", "once"])
def test_weights_are_restored_into_converted_parameters(convert):
    net = model()
    optimizer = co.AdamW(net, lr=0.05, compile=False, ema_decay=DECAY)
    train(net, optimizer)
    weights = [param.detach().clone() for param in net.parameters()]
    with optimizer.ema():
        convert(net)
    for param, weight in zip(net.parameters(), weights, strict=True):
        assert torch.equal(param, weight.to(param.dtype))


def test_a_replaced_parameter_is_followed_first(monkeypatch):
    """``net.double()`` makes new parameters here. The average moves along, and is swapped in and out there."""
    net = model()
    optimizer = co.AdamW(net, lr=0.05, compile=False, ema_decay=DECAY)
    train(net, optimizer)
    before = [average.clone() for average in averages(net, optimizer)]
    monkeypatch.setattr(torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True)
    net.double()
    weights = [param.detach().clone() for param in net.parameters()]
    assert_near(optimizer.ema_state_dict().values(), [average.double() for average in before])
    with optimizer.ema():
        assert_near(net.parameters(), [average.double() for average in before])
    assert_near(net.parameters(), weights, rtol=0, atol=0)


def test_an_average_that_is_added_later_does_not_repeat_the_first_step(compiled):
    """SGD's first step has no dampening. The average starts from the loaded weights."""
    net, twin = model(), model()
    options = {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}
    reference = torch.optim.SGD(twin.parameters(), **options)
    train(twin, reference, steps=range(3))
    net.load_state_dict(twin.state_dict())
    optimizer = co.SGD(net, **options, compile=compiled, ema_decay=DECAY)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    old = net[0].weight.detach().clone()
    train(net, optimizer, steps=[3])
    train(twin, reference, steps=[3])
    assert_near(net.parameters(), twin.parameters())
    expected = DECAY * old + (1 - DECAY) * net[0].weight.detach()
    torch.testing.assert_close(optimizer.state[net[0].weight]["ema"], expected)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_the_warm_up_of_the_optimizer_holds_for_groups_with_their_own_decay(name):
    net, twin = model(), model()
    for each, own in ((net, {}), (twin, {"ema_warmup": True})):
        groups = [{"params": each[0].parameters(), "ema_decay": 0.9, **own}, {"params": each[2].parameters()}]
        each.optimizer = getattr(co, name)(groups, lr=0.05, compile=False, **({} if own else {"ema_warmup": True}))
        train(each, each.optimizer)
    state, expected = net.optimizer.state, twin.optimizer.state
    assert torch.equal(state[net[0].weight]["ema"], expected[twin[0].weight]["ema"])
    assert "ema" not in state.get(net[2].weight, {})


def test_a_warm_up_without_an_average_counts_no_steps():
    net = model()
    optimizer = co.SGD(net, lr=0.05, compile=False, ema_warmup=True)
    train(net, optimizer)
    assert not optimizer.state.get(net[0].weight)
