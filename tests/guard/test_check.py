"""The guard: a step never uses a plan that was made for other memory or other metadata."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch

import compiled_optim as co
from compiled_optim.guard.check import metadata_check, plain_metadata_check
from tests.helpers import assert_close, parameters

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
    if kind == "shape":  # the state starts from zero
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


def test_ordinary_training_is_no_event(compiled, tmp_path, caplog):
    """A thousand steps with in-place updates, autograd, gradient buckets, checkpoints and pickling."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = co.AdamW(model, lr=1e-3, compile=compiled, on_realloc="raise")
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    params = list(model.parameters())
    bucket = torch.zeros(sum(p.numel() for p in params))
    for step in range(1000):
        if step % 3 == 0:  # as with DistributedDataParallel: gradients are views of one buffer that is kept
            for param, view in zip(params, bucket.split([p.numel() for p in params]), strict=True):
                param.grad = view.view_as(param)
            bucket.zero_()
        else:
            optimizer.zero_grad(set_to_none=step % 3 == 1)
        loss = model(torch.randn(5, 3)).square().mean()
        loss.backward()
        with torch.no_grad():
            params[0].mul_(0.999).clamp_(-1, 1)
            params[0].copy_(params[0].clone())
            sum(float(p.sum()) for p in params)
        params[0].data.add_(1e-3)
        optimizer.step()
        scheduler.step()
        if step % 100 == 0:
            torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "checkpoint")
            pickle.loads(pickle.dumps(optimizer))
            copy.deepcopy((model, optimizer))
            values, state = torch.load(tmp_path / "checkpoint", weights_only=True)
            model.load_state_dict(values)
            optimizer.load_state_dict(state)
            model.train().requires_grad_(True).to("cpu", torch.float32)
            torch.nn.utils.clip_grad_norm_(params, 1.0)
    assert optimizer.explain().events == ()
    assert not [record for record in caplog.records if record.name == "compiled_optim" and record.levelname != "INFO"]


def test_an_event_that_repeats_is_counted_not_told_again(compiled, caplog):
    optimizer, params, *_ = stepped(compiled)
    for _ in range(5):
        params[0].data = params[0].data.clone()
        optimizer.step()
    (event,) = optimizer.explain().events
    assert event.endswith("(seen 5 times)")
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_load_state_dict_does_not_hide_a_move(compiled):
    optimizer, params, *_ = stepped(compiled, on_realloc="raise")
    params[0].data = params[0].data.clone()
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(co.ReallocationError):
        optimizer.step()


def test_a_parameter_without_a_gradient_is_looked_at_too(compiled):
    optimizer, params, *_ = stepped(compiled, on_realloc="raise")
    params[0].grad = None
    optimizer.step()
    params[0].data = params[0].data.clone()
    with pytest.raises(co.ReallocationError):
        optimizer.step()


def test_states_moved_by_assigning_their_data(compiled):
    """Assigning ``state.data`` keeps the tensor object but changes its memory. Scripts move states to a device so."""
    optimizer, params, twin, twin_params = stepped(compiled)
    for opt in (optimizer, twin):
        for state in opt.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].data = state[name].data * 2
    for opt in (optimizer, twin):
        opt.step()
    assert_close(params, twin_params, 2e-6)
    for param, twin_param in zip(params, twin_params, strict=True):
        torch.testing.assert_close(optimizer.state[param]["exp_avg"], twin.state[twin_param]["exp_avg"])


def test_states_kept_in_another_dtype_stay_so(compiled):
    params = parameters([(3, 4)], torch.bfloat16)
    optimizer = co.AdamW(params, compile=compiled)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    optimizer.state[params[0]]["exp_avg"] = optimizer.state[params[0]]["exp_avg"].float()
    params[0].data = params[0].data.clone()
    optimizer.step()
    dtypes = {name: state.dtype for name, state in optimizer.state[params[0]].items()}
    assert (dtypes["exp_avg"], dtypes["exp_avg_sq"]) == (torch.float32, torch.bfloat16)


def test_memory_that_was_taken_away_is_an_error(compiled):
    optimizer, params, *_ = stepped(compiled)
    size = params[0].untyped_storage().nbytes()
    params[0].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="parameter 'weight' has no memory"):
        optimizer.step()
    assert int(optimizer.state[params[1]]["step"]) == 1
    params[0].untyped_storage().resize_(size)
    with torch.no_grad():
        params[0].fill_(1.0)
    optimizer.step()
    assert int(optimizer.state[params[1]]["step"]) == 2


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
    variants["none"] = None
    for reference in (base, parameter, variants["strides"], None):
        fast, plain = metadata_check([base, reference]), plain_metadata_check([base, reference])
        for name, variant in variants.items():
            assert fast([base, variant]) == plain([base, variant]), name
    assert plain_metadata_check([base])([variants["same"]])
    assert sum(plain_metadata_check([base])([variant]) for variant in variants.values()) == 2
