"""Tests of steps inside dispatch modes: FakeTensorMode, tracers, and modes of users. The reference is torch.optim."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import compiled_optim as co
from tests.helpers import assert_close, assert_same_state, copies, gradients, parameters, run_python

SHAPES = [(8, 5), (7,)]
OPTIONS = [{}, {"max_grad_norm": 1.0}, {"maximize": True}]


def fake_training(make):
    """Train a fake model; return its optimizer."""
    model = torch.nn.Linear(4, 3)
    optimizer = make(model.parameters())
    for _ in range(2):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_fake_parameters_have_the_states_of_torch(compiled):
    with FakeTensorMode():
        ours = fake_training(lambda params: co.AdamW(params, amsgrad=True, compile=compiled))
        theirs = fake_training(lambda params: torch.optim.AdamW(params, amsgrad=True))
    for values, expected in zip(ours.state.values(), theirs.state.values(), strict=True):
        assert values.keys() == expected.keys()
        for name in values.keys() - {"step"}:
            assert isinstance(values[name], FakeTensor)
            assert (values[name].shape, values[name].dtype) == (expected[name].shape, expected[name].dtype)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["SGD", "Lamb", "AdamP", "BertAdam"])
def test_fake_parameters_with_any_rule(name, options, compiled):
    if name == "BertAdam" and "max_grad_norm" in options:
        options = {}  # it clips by default
    with FakeTensorMode():
        optimizer = fake_training(lambda params: getattr(co, name)(params, lr=0.1, compile=compiled, **options))
    optimizer.step()  # after the mode has ended; nothing has a gradient
    for param in optimizer.param_groups[0]["params"]:
        param.grad = param.detach()
    optimizer.step()


def test_a_fake_step_of_a_real_model_changes_nothing(compiled):
    """As in torch, operations inside the mode work on fake copies."""
    params = parameters(SHAPES)
    optimizer = co.AdamW(params, compile=compiled)
    for param, grad in zip(params, next(gradients(params, 1)), strict=True):
        param.grad = grad
    optimizer.step()
    before = copies(params), copy.deepcopy(optimizer.state_dict())
    with FakeTensorMode(allow_non_fake_inputs=True):
        optimizer.step()
    with FakeTensorMode(), pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"):
        optimizer.step()
    assert all(torch.equal(param, old) for param, old in zip(params, before[0], strict=True))
    assert_same_state(optimizer.state_dict(), before[1])
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 2


FAKE_STEPS = """
import torch
import compiled_optim as co
from torch._subclasses.fake_tensor import FakeTensorMode

for name in ("AdamW", "Lamb", "AdamP"):
    model = torch.nn.Linear(4, 3)
    optimizer = getattr(co, name)(model)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        optimizer.step()
        fake = torch.nn.Linear(4, 3)
        fakes = getattr(co, name)(fake)
        fake(torch.ones(2, 4)).sum().backward()
        fakes.step()
    fakes.step()
    optimizer.step()
    model.bias.grad = mode.from_tensor(torch.ones(3))  # only this gradient is fake
    optimizer.step()
    model.bias.grad = torch.ones(3)
    optimizer.step()
    print(*(int(values["step"]) for values in optimizer.state.values()))
"""


def test_compiled_code_never_gets_a_fake_tensor():
    """In a process of its own, because compiled code on a fake tensor would crash it. Fake steps are not counted."""
    assert run_python(FAKE_STEPS).split() == ["3", "3"] * 3


def test_a_traced_step_is_recorded(compiled):
    """``make_fx`` records the eager formula; the recorded graph makes the step of torch.optim."""
    params = parameters(SHAPES)
    twins = copies(params)
    optimizer = co.AdamW(params, lr=0.1, compile=compiled)
    reference = torch.optim.AdamW(twins, lr=0.1)
    steps = list(gradients(params, 2))
    for param, twin, grad in zip(params, twins, steps[0], strict=True):
        param.grad, twin.grad = grad, grad.clone()
    optimizer.step()
    reference.step()

    def step(*grads):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()

    graph = make_fx(step)(*steps[1])
    assert any("foreach" in str(node.target) for node in graph.graph.nodes)
    for twin, grad in zip(twins, steps[1], strict=True):
        twin.grad = grad
    reference.step()
    assert_close(params, twins, 1e-6)  # tracing has made the step


IN_A_MODE = """
import torch
import compiled_optim as co
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))

for mode, name in ((FlopCounterMode(display=False), "AdamW"), (Mode(), "Lamb")):
    model = torch.nn.Linear(4, 3)
    twin = torch.nn.Linear(4, 3)
    twin.load_state_dict(model.state_dict())
    optimizer, eager = getattr(co, name)(model), getattr(co, name)(twin, compile=False)
    with mode:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.step()
    twin(torch.ones(2, 4)).sum().backward()
    eager.step()
    eager.step()
    torch.testing.assert_close(model.weight, twin.weight)
    assert optimizer.explain().mode == "compiled"
"""


def test_a_first_step_inside_a_mode_compiles():
    """Without the disk cache, so that it really compiles."""
    run_python(IN_A_MODE, TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
