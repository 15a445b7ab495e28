"""Tests of ``torch.amp.GradScaler``, which unscales gradients itself or, with ``fused=True``, leaves it to the step."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import compiled_optim as co
from catalog import CATALOG
from compiled_optim import npu
from tests.helpers import LARGE, SMALL, assert_close, assert_same_state, copies, gradients, parameters


@pytest.fixture(params=[None, True], ids=["default", "fused"])
def fused(request):
    """Run a test with a scaler that unscales, and with one that leaves it to the step."""
    return request.param


def scaled_step(scaler, optimizer, params, grads):
    """Set scaled gradients, as backward of a scaled loss does, and step."""
    scaler.scale(torch.zeros(()))  # the scaler creates its scale on first use
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad * scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("name", CATALOG)
def test_a_scaled_step_equals_an_unscaled_one(name, compiled, fused):
    """The reference gets unscaled gradients. Scales are powers of two, so unscaling is exact."""
    params = parameters([(8, 5), (7,), *LARGE])
    twins = copies(params)
    optimizer = getattr(co, name)(params, **CATALOG[name].typical, compile=compiled, fused=fused)
    plain = getattr(co, name)(twins, **CATALOG[name].typical, compile=compiled)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for grads in gradients(params, 5):
        scaled_step(scaler, optimizer, params, grads)
        for param, twin, grad in zip(params, twins, grads, strict=True):
            assert torch.equal(param.grad, grad)
            twin.grad = grad
        plain.step()
    assert scaler.get_scale() == 2.0**12
    assert_close(params, twins, 1e-6)


@pytest.mark.parametrize("name", [name for name, entry in CATALOG.items() if entry.fused])
def test_grad_scaler_has_the_same_effect_as_on_torch(name, compiled, fused):
    params = parameters(SMALL + LARGE)
    twins = copies(params)
    optimizer = getattr(co, name)(params, **CATALOG[name].typical, compile=compiled, fused=fused)
    reference = CATALOG[name].reference(twins, **CATALOG[name].typical, fused=fused)
    scalers = [torch.amp.GradScaler("cpu", init_scale=3e4, growth_interval=2) for _ in range(2)]
    for step, grads in enumerate(gradients(params, 8)):
        if step == 3:
            grads[0][0] = float("inf")
        scaled_step(scalers[0], optimizer, params, grads)
        scaled_step(scalers[1], reference, twins, grads)
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_close([param.grad for param in params[1:]], [twin.grad for twin in twins[1:]], 1e-6)  # all finite
    assert_close(params, twins, 2e-6)


@pytest.mark.parametrize("name", CATALOG)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_nothing_changes_on_an_overflow(name, bad, compiled, fused):
    params = parameters([(8, 5), (7,)])
    optimizer = getattr(co, name)(params, **CATALOG[name].typical, compile=compiled, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    steps = list(gradients(params, 3))
    scaled_step(scaler, optimizer, params, steps[0])
    before = [param.detach().clone() for param in params], copy.deepcopy(optimizer.state_dict())
    steps[1][1][3] = bad
    scaled_step(scaler, optimizer, params, steps[1])
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(param, old) for param, old in zip(params, before[0], strict=True))
    assert_same_state(optimizer.state_dict(), before[1])
    scaled_step(scaler, optimizer, params, steps[2])
    assert all(not torch.equal(param, old) for param, old in zip(params, before[0], strict=True))


def test_an_overflow_on_the_first_step_makes_no_state(compiled, fused):
    params = parameters([(4,)])
    optimizer = co.AdamW(params, compile=compiled, fused=fused)
    scaled_step(torch.amp.GradScaler("cpu", init_scale=8.0), optimizer, params, [torch.full((4,), float("inf"))])
    assert not optimizer.state


def test_frameworks_see_that_a_step_was_skipped(compiled):
    """accelerate wraps ``step`` and looks whether the scaler has called it; only then its scheduler advances."""
    params = parameters([(4,)])
    optimizer = co.AdamW(params, compile=compiled)
    calls, step = [], optimizer.step
    optimizer.step = lambda *args: (calls.append(1), step(*args))[1]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for grad in (torch.ones(4), torch.full((4,), float("inf")), torch.ones(4)):
        scaled_step(scaler, optimizer, params, [grad])
    assert len(calls) == 2
    assert optimizer.state[params[0]]["step"] == 2


def test_frameworks_see_whether_the_step_unscales():
    """Lightning refuses to clip if it does. The copy and the pickled optimizer say the same as the original."""
    params = parameters([(4,)])
    for fused in (None, False, True):
        optimizer = co.Lion(params, fused=fused)
        for each in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert each._step_supports_amp_scaling is bool(fused)


def test_no_recompile_after_an_overflow_on_the_first_step(fused):
    params = parameters([(4,)])
    optimizer = co.AdamW(params, max_grad_norm=1.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for grad in (torch.full((4,), float("inf")), torch.ones(4)):
        scaled_step(scaler, optimizer, params, [grad])
    assert optimizer.explain().recompiles == 0


def test_a_step_that_failed_is_not_unscaled_twice(compiled):
    """GradScaler removes grad_scale from the optimizer only after a successful step. Otherwise it scales it again."""
    params = [torch.nn.Parameter(torch.zeros(4))]
    optimizer = co.SGD(params, lr=1.0, on_realloc="raise", compile=compiled, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled_step(scaler, optimizer, params, [torch.ones(4)])
    params[0].data = params[0].data.clone()
    with pytest.raises(co.ReallocationError):
        scaled_step(scaler, optimizer, params, [torch.ones(4)])
    optimizer.on_realloc = "recompile"
    params[0].grad = torch.full((4,), 1024.0)
    scaler.step(optimizer)
    assert params[0].tolist() == [-2.0] * 4


def test_a_step_that_is_refused_leaves_no_scale():
    """Also before anything is computed: in eval mode of Schedule-Free, and inside ema()."""
    params = [torch.nn.Parameter(torch.zeros(4))]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    schedule_free = co.ScheduleFreeSGD(params, compile=False, fused=True)
    schedule_free.eval()
    with pytest.raises(RuntimeError, match="eval mode"):
        scaled_step(scaler, schedule_free, params, [torch.ones(4)])
    averaged = co.SGD(params, lr=1.0, compile=False, fused=True, ema_decay=0.9)
    averaged.step()
    params[0].grad = torch.zeros(4)
    averaged.step()
    with averaged.ema(), pytest.raises(RuntimeError, match="inside ema"):
        scaled_step(scaler, averaged, params, [torch.ones(4)])
    for optimizer in (schedule_free, averaged):
        assert not hasattr(optimizer, "grad_scale")
        assert not hasattr(optimizer, "found_inf")


def test_a_scale_set_by_hand(compiled):
    """grad_scale may be a one-element tensor of any shape, as in torch's fused optimizers."""
    params = [torch.nn.Parameter(torch.zeros(4))]
    optimizer = co.SGD(params, lr=1.0, compile=compiled)
    optimizer.grad_scale = torch.tensor([4.0])
    params[0].grad = torch.full((4,), 4.0)
    optimizer.step()
    assert params[0].tolist() == [-1.0] * 4
    assert params[0].grad.tolist() == [1.0] * 4


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_copied_gradients_are_unscaled_too(compiled, max_grad_norm):
    """The step copies gradients that have other strides than their parameter, and increments their version."""
    params = parameters([(8, 5), (6, 4)])
    optimizer = co.AdamW(params, compile=compiled, fused=True, max_grad_norm=max_grad_norm)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    for first, second in gradients(params, 3):
        params[0].grad = (first * 1024).t().contiguous().t()
        params[1].grad = second * 1024
        versions = [param.grad._version for param in params]
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(params[0].grad, first)
        assert torch.equal(params[1].grad, second)
        assert all(param.grad._version > version for param, version in zip(params, versions, strict=True))


def test_a_comparison_with_the_eager_step():
    params = parameters([(8, 5), (7,)])
    optimizer = co.AdamW(params, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for grads in gradients(params, 2):
        with optimizer.compare_eager() as comparison:
            scaled_step(scaler, optimizer, params, grads)
        assert comparison.largest < 1e-6


def test_gradients_the_user_has_unscaled_are_not_unscaled_again(compiled, fused):
    """Every second step calls ``scaler.unscale_`` and ``clip_grad_norm_``. The reference is torch.optim."""
    params = parameters([(8, 5), (7,)])
    twins = copies(params)
    optimizer, reference = co.SGD(params, lr=0.1, compile=compiled, fused=fused), torch.optim.SGD(twins, lr=0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for step, grads in enumerate(gradients(params, 4)):
        for scaler, stepped, those in zip(scalers, (optimizer, reference), (params, twins), strict=True):
            scaler.scale(torch.zeros(()))
            for param, grad in zip(those, grads, strict=True):
                param.grad = grad * 1024.0
            if step % 2 == 0:
                scaler.unscale_(stepped)
                torch.nn.utils.clip_grad_norm_(those, 0.5)
            scaler.step(stepped)
            scaler.update()
    assert_close(params, twins, 1e-6)
    assert optimizer.explain().recompiles == 0


def test_clipping_is_of_the_unscaled_gradients(compiled, fused):
    params = parameters([(8, 5), (7,)])
    twins = copies(params)
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.3}]
    optimizer = co.SGD(groups, lr=0.1, max_grad_norm=0.5, compile=compiled, fused=fused)
    reference = torch.optim.SGD([{"params": twins[:1]}, {"params": twins[1:], "lr": 0.3}], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for grads in gradients(params, 3):
        scaled_step(scaler, optimizer, params, grads)
        for twin, grad in zip(twins, grads, strict=True):
            twin.grad = grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(twins, 0.5)
        reference.step()
        torch.testing.assert_close(optimizer.last_grad_norm.float(), norm, rtol=1e-5, atol=0)
        assert torch.equal(params[0].grad, grads[0])  # unscaled, not clipped
    assert_close(params, twins, 5e-6)


def test_float16_parameters(compiled):
    """The scaler passes float16 gradients to fused optimizers. They are unscaled in float32 and do not underflow."""
    (param,) = params = [torch.nn.Parameter(torch.zeros(64, dtype=torch.float16))]
    optimizer = co.SGD(params, lr=2.0**20, compile=compiled, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(torch.zeros(()))
    param.grad = torch.full((64,), 2.0**-10, dtype=torch.float16)  # 2^-26 when unscaled, which float16 cannot represent
    scaler.step(optimizer)
    assert param[0].item() == -(2.0**-6)


def test_autocast_training_learns_as_with_torch(compiled):
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    losses = []
    for make in (lambda p: co.AdamW(p, lr=1e-2, compile=compiled), lambda p: torch.optim.AdamW(p, lr=1e-2)):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
        optimizer, scaler, curve = make(model.parameters()), torch.amp.GradScaler("cpu", init_scale=256.0), []
        for _ in range(20):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (model(x).float().squeeze(1) - x.sum(1)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            curve.append(loss.item())
        losses.append(curve)
    assert losses[0][-1] < 0.8 * losses[0][0]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-2, atol=0)


class ScalerOfTorchNpu(torch.amp.GradScaler):
    """A scaler that passes itself to fused optimizers as ``grad_scaler``, an argument that torch has removed."""

    def step(self, optimizer, *args, **kwargs):
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            return optimizer.step(*args, **dict(kwargs, grad_scaler=self))
        return super().step(optimizer, *args, **kwargs)


@pytest.mark.parametrize("make", [co.SGD, npu.NpuFusedSGD])
def test_the_scaler_of_torch_npu(make, fused):
    params = parameters([(8, 5)])
    twins = copies(params)
    optimizer, reference = make(params, lr=0.1, compile=False, fused=fused), torch.optim.SGD(twins, lr=0.1)
    scalers = ScalerOfTorchNpu("cpu", init_scale=64.0), torch.amp.GradScaler("cpu", init_scale=64.0)
    for step, grads in enumerate(gradients(params, 3)):
        if step == 1:
            grads[0][0] = float("inf")
        scaled_step(scalers[0], optimizer, params, grads)
        scaled_step(scalers[1], reference, twins, grads)
    assert scalers[0].get_scale() == scalers[1].get_scale() == 32.0
    assert_close(params, twins, 1e-6)


def test_a_scaled_step_after_plain_ones(compiled):
    """The plan of the plain steps does not unscale, so it is not used again."""
    params = [torch.nn.Parameter(torch.zeros(4))]
    optimizer = co.SGD(params, lr=1.0, compile=compiled, fused=True)
    params[0].grad = torch.ones(4)
    optimizer.step()
    scaled_step(torch.amp.GradScaler("cpu", init_scale=8.0), optimizer, params, [torch.ones(4)])
    assert params[0].tolist() == [-2.0] * 4
    assert params[0].grad.tolist() == [1.0] * 4
