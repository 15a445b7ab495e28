"""A watched module whose parameters were replaced: checkpoints, failing steps, copies, parameter groups, schedulers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import compiled_optim as co
from tests.helpers import assert_close

from .watching import held, model, train


def test_loading_model_and_optimizer_with_assigned_parameters(compiled):
    """``load_state_dict(assign=True)`` makes new parameters. A checkpoint loaded afterwards applies to them."""
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


@pytest.mark.parametrize("watched", [False, True])
def test_copies_of_parameters_that_are_not_dense(watched, compiled):
    """deepcopy makes them dense, which is no reallocation."""
    net = nn.Module()
    net.weight = nn.Parameter(torch.randn(4, 6)[:, ::2])
    optimizer = co.AdamW(net if watched else [net.weight], lr=0.1, compile=compiled, on_realloc="raise")
    net.weight.grad = torch.ones(4, 3)
    optimizer.step()
    net, optimizer = copy.deepcopy((net, optimizer))
    assert net.weight.stride() == (3, 1)
    twin = nn.Parameter(net.weight.detach().clone())
    reference = torch.optim.AdamW([twin], lr=0.1)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    net.weight.grad = twin.grad = torch.ones(4, 3)
    for each in (optimizer, reference):
        each.step()
    assert_close([net.weight], [twin], 2e-6)
    assert int(optimizer.state[net.weight]["step"]) == 2


@pytest.mark.parametrize("kind", ["dtype", "shape"])
def test_a_copy_sees_a_change_that_the_original_has_not_followed(kind, compiled):
    net = model()
    optimizer = co.AdamW(net, lr=0.1, compile=compiled, on_realloc="raise")
    train(net, optimizer)
    net[0].weight.data = net[0].weight.data.double() if kind == "dtype" else torch.ones(5, 3)
    net[0].weight.grad = None
    net, optimizer = copy.deepcopy((net, optimizer))
    with pytest.raises(co.ReallocationError, match=f"parameter '0.weight': {kind} changed"):
        optimizer.step()


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
