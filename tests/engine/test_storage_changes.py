"""States that come from another storage: loaded from a checkpoint, or kept before an option of the group changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import compiled_optim as co


def made(optimizer: str = "AdamW", shape: tuple[int, ...] = (64, 64), dtype=torch.float32, **options: Any):
    """Return an eager optimizer and its only parameter."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    param = torch.nn.Parameter(values.to(dtype))
    return getattr(co, optimizer)([param], lr=1e-2, compile=False, **options), param


def step(optimizer: co.Optimizer, param: torch.Tensor, seed: int = 1) -> None:
    param.grad = 0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)).to(param.dtype)
    optimizer.step()


def saved(*args: Any, **options: Any) -> dict[str, Any]:
    """Return a checkpoint after one step."""
    optimizer, param = made(*args, **options)
    step(optimizer, param)
    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("layout", ["tensors", "flat"])
def test_codes_of_a_checkpoint_are_decoded(layout):
    checkpoint = saved(state_dtype="8bit")
    optimizer, param = made(layout=layout)
    optimizer.load_state_dict(checkpoint)
    step(optimizer, param, 2)
    exact, twin = made()
    for seed in (1, 2):
        step(exact, twin, seed)
    assert optimizer.state[param].keys() == {"step", "exp_avg", "exp_avg_sq"}
    for name in ("exp_avg", "exp_avg_sq"):
        expected = exact.state[twin][name]
        assert (optimizer.state[param][name] - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("layout", ["tensors", "flat"])
@pytest.mark.parametrize("other", [{"rounding": "kahan"}, {}], ids=["kahan", "none"])
def test_companions_of_another_storage_are_dropped(layout, other):
    checkpoint = saved(dtype=torch.bfloat16, master_weights=True)
    optimizer, param = made(dtype=torch.bfloat16, layout=layout, **other)
    optimizer.load_state_dict(checkpoint)
    assert "master" in optimizer.state[param]
    step(optimizer, param, 2)
    assert "master" not in optimizer.state[param]
    assert ("compensation" in optimizer.state[param]) is bool(other)


KEPT = (None, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_an_average_that_a_checkpoint_lacks_starts_at_the_loaded_weights(dtype, kept):
    checkpoint = saved(dtype=dtype)
    chosen = {} if kept is None else {"state_dtype": {"ema": kept}}
    optimizer, param = made(dtype=dtype, ema_decay=0.5, **chosen)
    before = param.detach().float().clone()
    optimizer.load_state_dict(checkpoint)
    step(optimizer, param, 2)
    average = optimizer.ema_state_dict()["0"]
    assert average.dtype == (kept or torch.float32)
    tolerance = 2.0**-6 if torch.bfloat16 in (kept, dtype) else 2.0**-10
    torch.testing.assert_close(average.float(), (before + param.detach().float()) / 2, rtol=tolerance, atol=2e-4)


def test_an_average_stays_in_float32_if_all_states_are_in_8_bits():
    optimizer, param = made(dtype=torch.bfloat16, ema_decay=0.5, state_dtype="8bit")
    step(optimizer, param)
    assert optimizer.state[param]["exp_avg"].dtype == torch.uint8
    assert optimizer.state[param]["ema"].dtype == torch.float32


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
def test_states_that_no_option_names_are_rounded_as_rounding_says(kept):
    optimizer, param = made(dtype=torch.bfloat16, state_dtype={"exp_avg_sq": kept})
    twin, other = made(dtype=torch.bfloat16)
    for each, its in ((optimizer, param), (twin, other)):
        step(each, its)
    assert optimizer.state[param]["exp_avg_sq"].dtype == kept
    assert torch.equal(optimizer.state[param]["exp_avg"], twin.state[other]["exp_avg"]), "rounded to nearest"


@pytest.mark.parametrize("optimizers", [("AdamP", "AdamW"), ("AdamW", "AdamP")], ids=str)
@pytest.mark.parametrize("chosen", ["8bit", None])
def test_scales_by_rows_and_by_blocks_are_converted(optimizers, chosen):
    shape, (name, other) = (64, 96), optimizers
    checkpoint = saved(name, shape, state_dtype="8bit")
    checkpoint["param_groups"] = saved(other, shape)["param_groups"]
    source, twin = made(name, shape, state_dtype="8bit")
    step(source, twin)
    expected = source.full_state_dict()["state"][0]
    optimizer, param = made(other, shape, **({"state_dtype": chosen} if chosen else {}))
    optimizer.load_state_dict(checkpoint)
    assert torch.equal(optimizer.full_state_dict()["state"][0]["exp_avg"], expected["exp_avg"])
    optimizer.param_groups[0]["betas"] = (1 - 1e-7, 1 - 1e-7)  # so that states stay as they are
    step(optimizer, param, 2)
    found = optimizer.full_state_dict()["state"][0]
    for key in ("exp_avg", "exp_avg_sq"):
        assert (found[key] - expected[key]).norm() < 0.1 * expected[key].norm()
    if chosen:
        assert optimizer.state[param]["exp_avg_scale"].shape == ((64,) if other == "AdamP" else (48,))


UNFIT = {
    "too few scales": ("8bit", "exp_avg_scale", torch.ones(1), "state 'exp_avg' of .* is torch.float32 of shape"),
    "scales of float16": ("8bit", "exp_avg_scale", torch.ones(32).half(), "is torch.float16 of shape .32,., and not"),
    "no scales": ("8bit", "exp_avg_sq_scale", None, "'exp_avg_sq_scale' is NoneType"),
    "master of another shape": ("master", "master", torch.ones(64), "state 'master' of .* has shape .64,."),
    "master of integers": ("master", "master", torch.ones(64, 64).int(), "'master' of .* is torch.int32, not a tensor"),
    "compensation": ("kahan", "compensation", torch.ones(64), "state 'compensation' of .* has shape .64,."),
}


@pytest.mark.parametrize("edited", [False, True], ids=["loaded", "edited"])
@pytest.mark.parametrize(("kind", "key", "value", "message"), UNFIT.values(), ids=UNFIT)
def test_companions_that_do_not_fit_are_refused_before_anything_changes(kind, key, value, message, edited):
    options: dict[str, Any] = {
        "8bit": {"state_dtype": "8bit"},
        "master": {"dtype": torch.bfloat16, "master_weights": True},
        "kahan": {"dtype": torch.bfloat16, "rounding": "kahan"},
    }[kind]
    optimizer, param = made(**options)
    step(optimizer, param)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    if edited and value is not None:
        optimizer.state[param][key] = value
        before[0][key] = value
        with pytest.raises(ValueError, match=message):
            step(optimizer, param)
    else:
        checkpoint = copy.deepcopy(optimizer.state_dict())
        checkpoint["state"][0][key] = value
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(checkpoint)
    torch.testing.assert_close(optimizer.state_dict()["state"], before, rtol=0, atol=0)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_somebody_writes_to_a_compensated_parameter_stays(compiled):
    param = torch.nn.Parameter(torch.full((40,), 100.0).bfloat16())
    optimizer = co.SGD([param], lr=1.0, compile=compiled, rounding="kahan")
    param.grad = torch.full((40,), 0.2).bfloat16()
    optimizer.step()
    assert optimizer.state[param]["compensation"].tolist() == pytest.approx([-0.2] * 40, abs=0.02)
    param.grad = torch.zeros(40).bfloat16()
    for written in (0.0, torch.inf, -torch.inf):
        with torch.no_grad():
            param.fill_(written)
        for _ in range(2):
            optimizer.step()
            assert param.tolist() == [written] * 40


BF16_CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "master weights": ({}, {"master_weights": True}, {"master"}),
    "no master weights": ({"master_weights": True}, {"master_weights": False}, set()),
    "kahan": ({}, {"rounding": "kahan"}, {"compensation"}),
    "kahan from stochastic": ({"rounding": "stochastic"}, {"rounding": "kahan"}, {"compensation"}),
    "8 bits": ({}, {"state_dtype": "8bit"}, {"exp_avg_scale", "exp_avg_sq_scale"}),
}


@pytest.mark.parametrize("layout", ["tensors", "flat"])
@pytest.mark.parametrize(("before", "after", "companions"), BF16_CHANGES.values(), ids=BF16_CHANGES)
def test_an_edited_option_holds_from_the_next_step(before, after, companions, layout):
    optimizer, param = made(dtype=torch.bfloat16, layout=layout, **before)
    step(optimizer, param)
    optimizer.param_groups[0].update(after)
    step(optimizer, param, 2)
    assert optimizer.state[param].keys() == {"step", "exp_avg", "exp_avg_sq"} | companions


def test_an_entry_of_a_state_dtype_can_be_edited():
    optimizer, param = made(state_dtype={"exp_avg": "8bit"})
    step(optimizer, param)
    optimizer.param_groups[0]["state_dtype"]["exp_avg"] = torch.bfloat16
    step(optimizer, param, 2)
    assert optimizer.state[param]["exp_avg"].dtype == torch.bfloat16
    del optimizer.param_groups[0]["state_dtype"]
    optimizer.param_groups[0]["state_dtype"] = torch.float32
    step(optimizer, param, 3)
    assert optimizer.state[param]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("loads", [False, True], ids=["stepped", "loaded"])
@pytest.mark.parametrize("before", [{}, {"rounding": "stochastic"}], ids=str)
def test_an_edited_option_is_checked_before_anything_changes(before, loads):
    optimizer, param = made(dtype=torch.bfloat16, **before)
    step(optimizer, param)
    kept, state = param.detach().clone(), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.param_groups[0].update(rounding="kahan", master_weights=True)
    if loads:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(2):
        with pytest.raises(ValueError, match="pass one of both"):
            step(optimizer, param, 2)
    assert torch.equal(param.detach(), kept)
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)
    optimizer.param_groups[0].update(master_weights=False)
    step(optimizer, param, 2)
    assert "compensation" in optimizer.state[param]


def test_steps_are_counted_from_when_rounding_becomes_stochastic():
    optimizer, param = made("SGD", dtype=torch.bfloat16, momentum=0.9)
    step(optimizer, param)
    assert "step" not in optimizer.state[param]
    optimizer.param_groups[0]["rounding"] = "stochastic"
    for count in (2, 3):
        step(optimizer, param, count)
        assert optimizer.state[param]["step"] == count
