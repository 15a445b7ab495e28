"""Tests of WholeListBackend, with the example backend of the documentation, and of the CUDA backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import compiled_optim as co
from compiled_optim import backends
from compiled_optim.backends import registry, whole_lists
from tests.helpers import SMALL, assert_close, parameters, train

from .recording_backend import RecordingBackend


@pytest.fixture
def recording(monkeypatch):
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    backends.get("cpu")
    return backends.register(RecordingBackend())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "AdamP", "Lamb", "BertAdam"])
def test_the_example_backend_steps_as_eager_does(recording, name, dtype):
    ours, eager = parameters(SMALL, dtype), parameters(SMALL, dtype)
    optimizer = train(lambda p: getattr(co, name)(p, lr=0.1), ours)
    train(lambda p: getattr(co, name)(p, lr=0.1, compile=False), eager)
    assert optimizer.explain().backends == ("recording",)
    assert_close(ours, eager, 1e-2 if dtype == torch.bfloat16 else 1e-6)
    assert len(recording.graphs) == optimizer.explain().graphs > 0
    assert optimizer.explain().recompiles == 0, "twenty learning rates, one graph"


def test_registered_last_serves_the_device_and_can_be_asked_for_by_name(recording):
    assert backends.for_device("cpu") is recording
    assert "recording" in backends.names()
    params = parameters([(3,)])
    assert co.SGD(params).explain().backends == ("recording",)
    assert co.SGD(params, backend="cpu").explain().backends == ("cpu",)


def test_scalars_are_arguments_in_host_memory(recording):
    """A GPU gets scalars with the kernel launch. One tensor of all scalars would need a copy to the device."""
    train(lambda p: co.AdamW(p, max_grad_norm=1.0), parameters([(4, 3), (5,)]), steps=2)
    inputs = [[node for node in graph.graph.nodes if node.op == "placeholder"] for graph in recording.graphs]
    shapes = [tuple(node.meta["val"].shape) for node in max(inputs, key=len)]
    assert shapes.count(()) == 9, "eight scalars and the gradients' scale"
    assert (9,) not in shapes


def test_lists_are_cut_by_shape_and_equal_stretches_share_a_unit(recording, monkeypatch):
    monkeypatch.setattr(RecordingBackend, "limit", 2)
    params = parameters([(4,), (3, 2), (4,), (3, 2), (4,), (0,), (4,), (5,)])
    optimizer = train(lambda p: co.SGD(p, lr=0.1), params, steps=1)
    (calls,) = optimizer._stepper._plan.calls().values()
    assert [[p.numel() for p in call.pick(params)] for call in calls] == [[4, 4], [4, 4], [5, 6], [6]]
    assert calls[0].unit is calls[1].unit
    assert len(recording.graphs) == 3


class Wrong(RecordingBackend):
    """A backend whose compiled graphs do nothing."""

    def lower(self, module, inputs):
        return (lambda arguments: ()), 0


def test_a_graph_that_computes_something_else_is_refused():
    params = parameters([(4,)])
    before = params[0].detach().clone()
    with pytest.raises(co.BackendUnavailableError, match="does not compute what its eager form does"):
        train(lambda p: co.SGD(p, backend=Wrong()), params, steps=1)
    assert torch.equal(params[0], before)


def test_large_lists_are_not_verified(monkeypatch):
    """Verification copies the tensors of a graph, and there may not be enough memory for large ones."""
    monkeypatch.setattr(whole_lists, "MAX_VERIFIED_ELEMENTS", 10)
    with pytest.raises(co.BackendUnavailableError, match="does not compute what its eager form does"):
        train(lambda p: co.SGD(p, lr=0.1, backend=Wrong()), parameters([(4,), (6,)]), steps=1)
    params = parameters([(4,), (7,)])
    train(lambda p: co.SGD(p, lr=0.1, backend=Wrong()), params, steps=1)
    assert_close(params, parameters([(4,), (7,)]), 0)


def test_the_documentation_shows_the_example_as_it_is():
    source = (Path(__file__).parent / "recording_backend.py").read_text()
    example = source[source.index("from typing") :].strip()
    assert f"```python\n{example}\n```" in (Path(__file__).parents[2] / "docs" / "backends.md").read_text()
