"""The three changes that torch_npu's documentation warns of, for every optimizer and both policies.

These are: moving the model with ``module.cpu()``, replacing a parameter by a new object, and setting one to None. With
torch_npu they give "unpredictable results". Here the optimizer follows each change, or refuses to step.

The move starts on the ``npu`` device of tests/npu_device.py, in a separate process in which steps run eagerly. On the
CPU, an assignment to ``.data`` replaces the move.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import compiled_optim as co
from compiled_optim import npu
from tests.helpers import assert_same_state, run_python

NAMES = [name.removeprefix("NpuFused") for name in npu.__all__ if name != "NpuFusedOptimizer"]


def moved(net):
    for param in net.parameters():
        param.data = param.data.clone()


def replaced(net):
    net.weight = nn.Parameter(net.weight.detach() + 1)


def removed(net):
    net.bias = None


CAUSES = {
    "module.cpu()": (moved, ["storage", "storage"]),
    "a new object": (replaced, ["replaced"]),
    "None": (removed, ["removed"]),
}


def backward(net, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in net.parameters():
        param.grad = torch.randn(param.shape, generator=generator)


def stepped(name, compiled, policy):
    torch.manual_seed(0)
    net = nn.Linear(3, 4)
    optimizer = getattr(co, name)(net, lr=0.1, compile=compiled, on_realloc=policy)
    for seed in range(3):
        backward(net, seed)
        optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("name", NAMES)
def test_a_moved_replaced_or_removed_parameter_is_followed(name, cause, compiled):
    change, kinds = CAUSES[cause]
    net, optimizer = stepped(name, compiled, "recompile")
    old = list(net.parameters())
    states = {id(param): copy.deepcopy(dict(optimizer.state[param])) for param in old}
    change(net)
    # expected: a new optimizer over copies of the parameters, with the states assigned by hand
    twin_net = copy.deepcopy(net)
    twin = getattr(co, name)(twin_net.parameters(), lr=0.1, compile=False)
    for param, twin_param in zip(net.parameters(), twin_net.parameters(), strict=True):
        if id(param) in states:
            twin.state[twin_param] = states[id(param)]
    for seed in (3, 4):
        for each, opt in ((net, optimizer), (twin_net, twin)):
            backward(each, seed)
            opt.step()
    for param, expected in zip(net.parameters(), twin_net.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=2e-6, atol=1e-7)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in net.parameters()]
    assert {id(p) for p in optimizer.state} <= {id(p) for p in net.parameters()}
    assert len(optimizer.explain().events) == len(kinds)


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("name", NAMES)
def test_a_moved_replaced_or_removed_parameter_is_refused(name, cause, compiled):
    change, kinds = CAUSES[cause]
    net, optimizer = stepped(name, compiled, "raise")
    held = list(net.parameters())
    before = copy.deepcopy((held, optimizer.state_dict()))
    change(net)
    backward(net, 3)
    with pytest.raises(co.ReallocationError) as error:
        optimizer.step()
    assert [change.kind for change in error.value.changes] == kinds
    assert all(torch.equal(a, b) for a, b in zip(held, before[0], strict=True))
    assert_same_state(optimizer.state_dict(), before[1])


ON_THE_DEVICE = """
import torch
from tests import npu_device
npu_device.install()
import compiled_optim as co
from tests.guard.test_seed_causes import NAMES

for name in NAMES:
    for policy in ("recompile", "raise"):
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 4).to("npu")
        optimizer = getattr(co, name)(net, lr=0.1, compile=False, on_realloc=policy)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            for param in net.parameters():
                param.grad = torch.randn(param.shape, generator=generator).to("npu")
            optimizer.step()
        states = [{k: v.cpu().clone() if hasattr(v, "cpu") else v for k, v in optimizer.state[p].items()}
                  for p in net.parameters()]
        old = [p.detach().cpu().clone() for p in net.parameters()]
        net.cpu()
        optimizer.zero_grad()
        for param in net.parameters():
            param.grad = torch.ones_like(param)
        try:
            optimizer.step()
        except co.ReallocationError as error:
            assert policy == "raise", error
            assert [change.kind for change in error.changes] == ["device", "device"]
            assert "parameter 'weight': device changed from npu:0 to cpu" in str(error), error
            assert "`model.cpu()`" in str(error)
            assert [p.device.type for p in optimizer.param_groups[0]["params"]] == ["npu", "npu"]
            for now, then in zip(optimizer.param_groups[0]["params"], old):
                assert torch.equal(now.detach().cpu(), then)
            continue
        assert policy == "recompile"
        twins = [torch.nn.Parameter(p) for p in old]
        other = getattr(co, name)(twins, lr=0.1, compile=False)
        for param, state in zip(twins, states):
            param.grad = torch.ones_like(param)
            other.state[param] = state
        other.step()
        for param, expected in zip(net.parameters(), twins):
            assert torch.equal(param, expected), (name, param, expected)
        assert len(optimizer.explain().events) == 2, optimizer.explain().events
print("done")
"""


def test_module_cpu_from_an_npu_device():
    assert run_python(ON_THE_DEVICE) == "done\n"
