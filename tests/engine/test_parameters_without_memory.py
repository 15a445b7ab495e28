"""Tests of parameters that have no memory: on the meta device, and tensor subclasses that wrap other tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import compiled_optim as co
from tests.helpers import assert_close, copies, gradients, parameters


class Wrapper(torch.Tensor):
    """A quantised weight: int8 values and a scale, without memory of its own. ``detach`` is all it can do."""

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values, scale):
        self.values, self.scale = values, scale

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].values, args[0].scale)
        raise NotImplementedError(f"{function} of a quantised weight")


class TraceableWrapper(Wrapper):
    """The same, in the form that compilers can take apart."""

    def __tensor_flatten__(self):
        return ["values", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls(inner["values"], inner["scale"])


def quantised(kind, requires_grad=False):
    return nn.Parameter(kind(torch.ones(3, 4, dtype=torch.int8), torch.ones(())), requires_grad)


@pytest.mark.parametrize("kind", [Wrapper, TraceableWrapper])
def test_frozen_wrappers_are_left_alone(kind, compiled):
    """As in torch.optim: a model with frozen quantised weights trains its other parameters."""
    params = parameters([(8, 5), (7,)])
    twins = copies(params)
    frozen = quantised(kind)
    optimizer = co.AdamW([params[0], frozen, params[1]], compile=compiled, on_realloc="raise")
    reference = torch.optim.AdamW([twins[0], quantised(kind), twins[1]])
    for grads in gradients(params, 3):
        for param, twin, grad in zip(params, twins, grads, strict=True):
            param.grad, twin.grad = grad, grad.clone()
        optimizer.step()
        reference.step()
    assert_close(params, twins, 2e-6)
    assert optimizer.state.keys() == set(params)
    assert optimizer.state_dict()["state"].keys() == reference.state_dict()["state"].keys()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.explain().events


@pytest.mark.parametrize("kind", [Wrapper, TraceableWrapper])
def test_a_wrapper_that_is_trained_is_refused(kind, compiled):
    with pytest.raises(TypeError, match=f"cannot step parameter 0 of group 0: it is a {kind.__name__}"):
        co.AdamW([quantised(kind, requires_grad=True)], compile=compiled)


def test_a_frozen_wrapper_that_gets_a_gradient_is_refused(compiled):
    frozen, trained = quantised(TraceableWrapper), nn.Parameter(torch.ones(3))
    optimizer = co.AdamW([("base", frozen), ("head", trained)], compile=compiled)
    trained.grad = torch.ones(3)
    optimizer.step()
    frozen.grad = frozen.detach()
    with pytest.raises(TypeError, match="cannot step parameter 'base': it is a TraceableWrapper"):
        optimizer.step()
    assert optimizer.state[trained]["step"] == 1
    frozen.grad = None
    optimizer.step()
    assert optimizer.state[trained]["step"] == 2


def test_a_gradient_that_is_a_wrapper_is_refused(compiled):
    param = nn.Parameter(torch.ones(3, 4))
    optimizer = co.AdamW([("weight", param)], compile=compiled)
    param.grad = quantised(TraceableWrapper).detach()
    with pytest.raises(TypeError, match="the gradient of parameter 'weight' is a TraceableWrapper"):
        optimizer.step()
    assert torch.equal(param, torch.ones(3, 4))
    assert not optimizer.state


def test_meta_parameters_are_stepped_once_they_have_memory(compiled):
    """Deferred initialisation: the optimizer is constructed first. The reference starts with memory."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to("meta")
    optimizer = co.AdamW(model, lr=0.1, compile=compiled, on_realloc="raise")
    assert optimizer.explain().events == ()
    model.to_empty(device="cpu")
    values = parameters([param.shape for param in model.parameters()])
    with torch.no_grad():
        for param, value in zip(model.parameters(), values, strict=True):
            param.copy_(value)
    reference = torch.optim.AdamW(values, lr=0.1)
    for grads in gradients(values, 3):
        for param, value, grad in zip(model.parameters(), values, grads, strict=True):
            param.grad, value.grad = grad, grad.clone()
        optimizer.step()
        reference.step()
    assert_close(list(model.parameters()), values, 2e-6)


def test_a_step_on_the_meta_device(compiled):
    """torch.optim makes states on the meta device; so does this."""
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in [(3, 4), (5,), (5,)]]
    optimizer, reference = co.AdamW(params, compile=compiled), torch.optim.AdamW(params)
    for _ in range(2):
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer.step()
        reference.step()
    for param in params:
        for name in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[param][name].device.type == "meta"
            assert optimizer.state[param][name].shape == reference.state[param][name].shape
        assert optimizer.state[param]["step"] == 2
    optimizer.explain()
