"""What the engine needs of the guard: a plan is never used on memory or metadata it was not made for."""

from __future__ import annotations

import logging

import pytest
import torch

import compiled_optim as co
from compiled_optim.guard import metadata_check, plain_metadata_check

from .helpers import assert_close, parameters

CHANGES = {
    "storage": lambda p: setattr(p, "data", p.data.clone()),
    "dtype": lambda p: setattr(p, "data", p.data.double()),
    "strides": lambda p: setattr(p, "data", p.data.t().contiguous().t()),
    "shape": lambda p: setattr(p, "data", torch.ones(5, 6)),
}


def stepped(compiled, **options):
    params = parameters([(3, 4), (4,)])
    optimizer = co.AdamW([("weight", params[0]), ("bias", params[1])], lr=0.1, compile=compiled, **options)
    twin_params = parameters([(3, 4), (4,)])
    twin = torch.optim.AdamW(twin_params, lr=0.1)
    for opt, ps in ((optimizer, params), (twin, twin_params)):
        for param in ps:
            param.grad = torch.ones_like(param)
        opt.step()
    return optimizer, params, twin, twin_params


@pytest.mark.parametrize("kind", CHANGES)
def test_reallocation_is_followed(kind, compiled, caplog):
    optimizer, params, twin, twin_params = stepped(compiled)
    for param in (params[0], twin_params[0]):
        CHANGES[kind](param)
        param.grad = torch.ones_like(param)
    if kind == "shape":  # starts afresh
        twin.state.pop(twin_params[0])
    if kind == "dtype":
        for name in ("exp_avg", "exp_avg_sq"):
            twin.state[twin_params[0]][name] = twin.state[twin_params[0]][name].double()
    with caplog.at_level(logging.WARNING, logger="compiled_optim"):
        for _ in range(3):
            optimizer.step()
            twin.step()
    assert_close(params, twin_params, 2e-6)
    told = [record for record in caplog.records if record.name == "compiled_optim"]
    assert [record.levelname for record in told] == ["WARNING"], "told once"
    (event,) = optimizer.explain().events
    assert event.startswith(f"parameter 'weight': {kind} changed from ")


@pytest.mark.parametrize("kind", CHANGES)
def test_reallocation_is_refused(kind, compiled):
    optimizer, params, *_ = stepped(compiled, on_realloc="raise")
    original = params[0].data
    CHANGES[kind](params[0])
    params[0].grad = torch.ones_like(params[0])
    before = [p.detach().clone() for p in params], optimizer.state[params[1]]["exp_avg"].clone()
    for _ in range(2):  # not only once
        with pytest.raises(co.ReallocationError, match=f"parameter 'weight': {kind} changed from .* to ") as caught:
            optimizer.step()
    assert [change.kind for change in caught.value.changes] == [kind]
    assert all(torch.equal(a, b) for a, b in zip(before[0], params, strict=True))
    assert torch.equal(before[1], optimizer.state[params[1]]["exp_avg"])
    assert int(optimizer.state[params[1]]["step"]) == 1
    params[0].data = original
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert int(optimizer.state[params[1]]["step"]) == 2


def test_ordinary_training_is_no_event(compiled):
    optimizer, params, *_ = stepped(compiled, on_realloc="raise")
    for i in range(20):
        optimizer.zero_grad(set_to_none=bool(i % 2))
        (sum((p * p).sum() for p in params)).backward()
        with torch.no_grad():
            params[0].mul_(0.99)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.explain().events == ()


def test_both_metadata_checks_agree():
    base = torch.ones(2, 3)
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    variants = {
        "same": torch.zeros(2, 3),
        "parameter": parameter,
        "requires grad": torch.zeros(2, 3, requires_grad=True),
        "shape": torch.ones(3, 2),
        "rank": torch.ones(6),
        "strides": torch.ones(3, 2).t(),
        "expanded": torch.ones(1).expand(2, 3),
        "dtype": torch.ones(2, 3, dtype=torch.float64),
        "device": torch.ones(2, 3, device="meta"),
        "sparse": torch.ones(2, 3).to_sparse(),
        "negated": torch.complex(torch.ones(2, 3), torch.ones(2, 3)).conj().imag.contiguous(),
        "lazily negated": torch._neg_view(torch.ones(2, 3)),
    }
    for reference in (base, parameter, variants["strides"]):
        fast, plain = metadata_check([base, reference]), plain_metadata_check([base, reference])
        for name, variant in variants.items():
            assert fast([base, variant]) == plain([base, variant]), name
    assert plain_metadata_check([base])([variants["same"]])
    assert sum(plain_metadata_check([base])([variant]) for variant in variants.values()) == 2
