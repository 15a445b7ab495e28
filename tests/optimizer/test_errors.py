"""Tests of every error for invalid input: it has torch's wording and is raised before any change."""

from __future__ import annotations

import copy
import re

import pytest
import torch

import compiled_optim as co
from catalog import CATALOG
from tests.helpers import parameters

REFUSED = [(name, options, message) for name, entry in CATALOG.items() for options, message in entry.refused]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_hyperparameters(name, options, message):
    params = parameters([(2,)])
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        getattr(co, name)(params, **options)
    optimizer = getattr(co, name)(params)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        optimizer.add_param_group({"params": parameters([(2,)]), **options})
    assert len(optimizer.param_groups) == 1


def test_nesterov_error_is_both_what_torch_raises_and_what_torch_npu_documents():
    for kind in (ValueError, TypeError):
        with pytest.raises(kind, match="Nesterov"):
            co.SGD(parameters([(2,)]), nesterov=True)


def test_parameters():
    with pytest.raises(TypeError, match="should be an iterable of Tensors or dicts"):
        co.AdamW(torch.ones(2))
    with pytest.raises(ValueError, match="empty parameter list"):
        co.AdamW([])
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        co.AdamW([torch.ones(2, requires_grad=True) * 2])
    with pytest.raises(TypeError, match="param_group must be a dict"):
        co.AdamW(parameters([(2,)])).add_param_group(parameters([(2,)]))


class Snapshot:
    """A copy of all data that a failing step could change."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.values = self.take()

    def take(self):
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [p.detach().clone() for p in params], copy.deepcopy(self.optimizer.state_dict())

    def unchanged(self):
        (params, saved), (old_params, old_saved) = self.take(), self.values
        assert all(torch.equal(a, b) for a, b in zip(params, old_params, strict=True))
        assert saved["state"].keys() == old_saved["state"].keys()
        for key, state in saved["state"].items():
            assert state.keys() == old_saved["state"][key].keys()
            assert all(torch.equal(value, old_saved["state"][key][name]) for name, value in state.items())
        return True


def sparse(param):
    return torch.sparse_coo_tensor([[0], [0]], [1.0], param.shape)


BAD_GRADIENTS = [
    (
        "sparse",
        sparse,
        "^AdamW does not support sparse gradients, please consider SparseAdam instead: "
        "the gradient of parameter 'b' has layout torch.sparse_coo$",
    ),
    (
        "shape",
        lambda p: torch.ones(3),
        r"the gradient of parameter 'b' has shape \(3,\), but the parameter has \(2, 2\).*\.grad",
    ),
    (
        "device",
        lambda p: torch.ones(2, 2, device="meta"),
        "the gradient of parameter 'b' is on meta, but the parameter is on cpu",
    ),
    (
        "complex",
        lambda p: torch.ones(2, 2, dtype=torch.complex64),
        r"gradient of parameter 'b' is torch.complex64, but the parameter is real \(torch.float32\)",
    ),
]


class Odd(torch.nn.Parameter):
    """A parameter that accepts any gradient, also those that torch rejects on assignment to .grad."""

    grad = None


@pytest.mark.parametrize("stepped", [False, True], ids=["first step", "later"])
@pytest.mark.parametrize(("kind", "spoilt", "message"), BAD_GRADIENTS, ids=[case[0] for case in BAD_GRADIENTS])
def test_gradients_that_cannot_be_used(kind, spoilt, message, stepped, compiled):
    a, b = parameters([(3,), (2, 2)])
    b = Odd(b.detach())
    optimizer = co.AdamW([("a", a), ("b", b)], compile=compiled)
    a.grad, b.grad = torch.ones(3), torch.ones(2, 2)
    if stepped:
        optimizer.step()
    before = Snapshot(optimizer)
    b.grad = spoilt(b)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert before.unchanged()
    b.grad = torch.ones(2, 2)
    optimizer.step()  # works after the gradient is corrected
    assert int(optimizer.state[b]["step"]) == 1 + stepped


def test_a_hyperparameter_spoilt_between_steps(compiled):
    params = parameters([(3,), (2,)])
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    optimizer = co.AdamW(groups, compile=compiled)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = Snapshot(optimizer)
    groups[1]["lr"] = "fast"
    with pytest.raises(ValueError, match="fast"):
        optimizer.step()
    assert before.unchanged()
    groups[1]["lr"] = 0.1
    optimizer.step()
    assert [int(optimizer.state[param]["step"]) for param in params] == [2, 2]


def test_expanded_parameter(compiled):
    param = torch.nn.Parameter(torch.ones(1).expand(4))
    optimizer = co.SGD([param], compile=compiled)
    param.grad = torch.ones(4)
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 is an expanded tensor.*clone\(\)"):
        optimizer.step()


def test_state_that_belongs_to_another_model(compiled):
    donor = co.AdamW(parameters([(3,), (4,)]), compile=compiled)
    for param in donor.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    donor.step()
    params = parameters([(3,), (2, 2)])
    optimizer = co.AdamW([("a", params[0]), ("b", params[1])], compile=compiled)
    for param in params:
        param.grad = torch.ones_like(param)
    for param, other in zip(params, donor.param_groups[0]["params"], strict=True):
        optimizer.state[param] = donor.state[other]  # load_state_dict() would raise
    before = Snapshot(optimizer)
    with pytest.raises(ValueError, match=r"state 'exp_avg' of parameter 'b' has shape \(4,\).*\(2, 2\).*checkpoint"):
        optimizer.step()
    assert before.unchanged()
