"""Tests of optimizers that wrap one of ours, and of programs that replace its groups, compared with torch.optim."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import compiled_optim as co
from tests.helpers import assert_close

from .test_ecosystem import TOLERANCE, backward, batches, network, values

pytestmark = pytest.mark.usefixtures("one_thread")


class Delegating(torch.optim.Optimizer):
    """A wrapper like accelerate's. It delegates to the inner optimizer and temporarily replaces its ``step``.

    It does not call the constructor of the base class. Its attributes are properties. It loads the state of the inner
    optimizer from a checkpoint.
    """

    def __init__(self, inner):
        self.inner, self.made = inner, 0
        inner.load_state_dict(inner.state_dict())

    param_groups = property(
        lambda self: self.inner.param_groups, lambda self, groups: setattr(self.inner, "param_groups", groups)
    )
    state = property(lambda self: self.inner.state, lambda self, state: setattr(self.inner, "state", state))
    defaults = property(lambda self: self.inner.defaults)

    def step(self, closure=None):
        original = self.inner.step

        def counted(*args, **kwargs):
            self.made += 1
            return original(*args, **kwargs)

        self.inner.step = counted
        try:
            return self.inner.step(closure)
        finally:
            self.inner.step = original

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict)


class Sharing(torch.optim.Optimizer):
    """A wrapper that shares groups and state with the inner one. Every third step it averages with slow weights."""

    def __init__(self, inner):
        self.inner, self.count = inner, 0
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure=None):
        loss = self.inner.step(closure)
        self.count += 1
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    slow = self.state[param].setdefault("slow", param.clone())
                    if self.count % 3 == 0:
                        param.copy_(slow.lerp_(param, 0.5))
        return loss


class Masters(torch.optim.Optimizer):
    """A wrapper like apex. It replaces low-precision parameters by float32 copies, steps them and copies them back."""

    def __init__(self, inner):
        self.inner, self.pairs = inner, []
        super().__init__(inner.param_groups, inner.defaults)
        for group in inner.param_groups:
            for i, param in enumerate(group["params"]):
                master = nn.Parameter(param.detach().float())
                self.pairs.append((param, master))
                group["params"][i] = master
        self.param_groups = inner.param_groups

    def step(self, closure=None):
        for param, master in self.pairs:
            master.grad = param.grad.float()
        self.inner.step()
        with torch.no_grad():
            for param, master in self.pairs:
                param.copy_(master)

    def zero_grad(self, set_to_none=True):
        for param, _ in self.pairs:
            param.grad = None


@pytest.mark.parametrize("wrapper", [Delegating, Sharing, Masters])
def test_wrappers_around_an_optimizer(wrapper):
    def train(package):
        model = network()
        if wrapper is Masters:
            model.bfloat16()
        inner = package.AdamW(model.parameters(), lr=0.05)
        optimizer = wrapper(inner)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for number, (x, y) in enumerate(batches(10)):
            backward(model, (x.to(model[0].weight.dtype), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if number == 5 and wrapper is not Masters:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return model, optimizer

    (model, optimizer), (twin, other) = train(co), train(torch.optim)
    assert_close(values(model), values(twin), 1e-2 if wrapper is Masters else TOLERANCE)
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]
    assert optimizer.inner.explain().mode == "compiled"
    assert optimizer.inner.explain().recompiles == 0
    if wrapper is Delegating:
        assert optimizer.made == 10


def test_param_groups_reassigned():
    """Reassign copies of the groups, other groups of the same parameters, fewer groups, and all groups again."""

    def train(package):
        model = network()
        params = list(model.parameters())
        optimizer = package.AdamW(params, lr=0.05)
        for number, batch in enumerate(batches(12)):
            if number == 2:
                optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
            if number == 3:
                optimizer.param_groups[0]["lr"] = 0.02  # changes the copy
            if number == 4:
                (group,) = optimizer.param_groups
                halves = [{**group, "params": params[:3]}, {**group, "params": params[3:], "lr": 0.01}]
                optimizer.param_groups = halves
            if number == 6:
                optimizer.param_groups = optimizer.param_groups[1:]
            if number == 8:
                optimizer.param_groups = halves
            if number == 10:
                optimizer.param_groups[0]["params"] = params[:3][::-1]
            backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()
            for param in params:  # also those that are currently not in the optimizer
                param.grad = None
        return model, optimizer

    (model, optimizer), (twin, reference) = train(co), train(torch.optim)
    assert_close(values(model), values(twin), TOLERANCE)
    steps = [int(state["step"]) for state in optimizer.state_dict()["state"].values()]
    assert steps == [int(state["step"]) for state in reference.state_dict()["state"].values()]
    assert sorted(set(steps)) == [10, 12]
    assert optimizer.explain().events == ()


@pytest.fixture
def alone():
    """Create a process group with this process as its only rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_zero_redundancy_optimizer(alone):
    """torch's wrapper constructs the inner optimizer from its class and synchronizes the groups of both."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def train(make):
        model = network()
        optimizer = make(model.parameters(), lr=0.05)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for number, batch in enumerate(batches(10)):
            backward(model, batch)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if number == 5:
                if isinstance(optimizer, ZeroRedundancyOptimizer):
                    optimizer.consolidate_state_dict()
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer.load_state_dict(saved)
        return model, optimizer

    model, optimizer = train(lambda params, lr: ZeroRedundancyOptimizer(params, optimizer_class=co.AdamW, lr=lr))
    twin, _ = train(torch.optim.AdamW)
    assert isinstance(optimizer.optim, co.AdamW)
    assert optimizer.optim.explain().mode == "compiled"
    assert_close(values(model), values(twin), TOLERANCE)
