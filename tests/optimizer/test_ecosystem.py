"""Training loops with common tools. Each runs with a compiled optimizer and with torch.optim."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import compiled_optim as co
from catalog import CATALOG
from tests.backends.test_recompiles import compilations
from tests.helpers import assert_close, copies, parameters

pytestmark = pytest.mark.usefixtures("one_thread")

# gradients depend on the weights of the previous step, so rounding errors accumulate
TOLERANCE = 1e-5


def network():
    torch.manual_seed(0)
    # no bias before the batch norm: its gradient is rounding noise, which Adam scales up
    first = [nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.GELU()]
    return nn.Sequential(*first, nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 3))


def batches(count):
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        x = torch.randn(16, 6, generator=generator)
        yield x, x[:, :3].argmax(1)


def backward(model, batch, share=1.0):
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1]) * share
    loss.backward()
    return loss.item()


def values(model):
    return [value for value in model.state_dict().values() if value.is_floating_point()]


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "max_grad_norm", None])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_gradient_accumulation(name, clip):
    """The loop of Hugging Face's Trainer: groups with and without weight decay, micro-batches, clipping, warm-up."""

    def train(package, **options):
        model = network()
        decayed = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = getattr(package, name)(groups, lr=0.05, **options)
        scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * (1 - step / 20))
        losses, norms = [], []
        for number, batch in enumerate(batches(24)):
            losses.append(backward(model, batch, 1 / 3))
            if number % 3 == 2:
                if clip and not options:
                    norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
                optimizer.step()
                if options:
                    norms.append(optimizer.last_grad_norm.item())
                scheduler.step()
                optimizer.zero_grad()
        return model, losses, norms, optimizer

    model, losses, norms, optimizer = train(co, **({"max_grad_norm": 0.3} if clip == "max_grad_norm" else {}))
    twin, expected, expected_norms, _ = train(torch.optim)
    assert_close(values(model), values(twin), TOLERANCE)
    torch.testing.assert_close(losses, expected, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(norms, expected_norms, rtol=TOLERANCE, atol=TOLERANCE)
    assert not clip or max(norms) > 0.3, "the test must clip"
    assert optimizer.explain().recompiles == 0


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_averaged_models(kind):
    """AveragedModel, SWALR and update_bn work if a module is passed as params."""

    def train(package):
        model = network()
        optimizer = package.AdamW(model if package is co else model.parameters(), lr=0.05)
        options = {"multi_avg_fn": get_ema_multi_avg_fn(0.8)} if kind == "ema" else {}
        average = AveragedModel(model, **options)
        scheduler = SWALR(optimizer, swa_lr=0.01, anneal_epochs=4)
        for batch in batches(12):
            backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            scheduler.step()
        update_bn(batches(5), average)
        return average, model, optimizer

    average, model, optimizer = train(co)
    twin, twin_model, _ = train(torch.optim)
    assert_close(values(average), values(twin), TOLERANCE)
    assert_close(values(model), values(twin_model), TOLERANCE)
    assert optimizer.explain().events == ()
    assert optimizer.explain().recompiles == 0


def test_hooks_that_change_gradients_and_weights():
    """The step has a pre-hook that centers gradients, a post-hook that clamps weights, and a closure."""

    def train(package):
        model = network()
        optimizer = package.SGD(model.parameters(), lr=0.1, momentum=0.9)
        calls = []

        def before(opt, args, kwargs):
            calls.append("before")
            for param in opt.param_groups[0]["params"]:
                if param.grad is not None and param.ndim > 1:
                    param.grad.sub_(param.grad.mean(1, keepdim=True))

        def after(opt, args, kwargs):
            calls.append("after")
            with torch.no_grad():
                torch._foreach_clamp_max_(opt.param_groups[0]["params"], 0.4)

        optimizer.register_step_pre_hook(before)
        handle = optimizer.register_step_post_hook(after)
        for number, batch in enumerate(batches(8)):
            if number == 6:
                handle.remove()
            optimizer.zero_grad()
            optimizer.step(lambda batch=batch: backward(model, batch))
        return model, calls

    (model, calls), (twin, expected) = train(co), train(torch.optim)
    assert calls == expected
    assert_close(values(model), values(twin), TOLERANCE)


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "with a scheduler and hooks"])
def test_the_profiler_shows_one_range_for_each_step(hooked):
    model = network()
    optimizer = co.AdamW(model)
    if hooked:
        LambdaLR(optimizer, lambda step: 1.0)
        optimizer.register_step_post_hook(lambda opt, args, kwargs: None)
    backward(model, next(batches(1)))
    optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("Optimizer.")}
    assert counts == {"Optimizer.step#AdamW.step": 3, "Optimizer.zero_grad#AdamW.zero_grad": 3}


@pytest.mark.parametrize("name", CATALOG)
def test_an_optimizer_for_each_parameter_in_backward(name):
    """Each optimizer steps in a hook after its gradient is accumulated, and frees the gradient. They share units."""
    entry = CATALOG[name]
    options = {**entry.typical, **entry.without_norm, "lr": 0.02}
    warm = parameters([(5, 4), (9,)])  # with and without rows: at most two units
    for param in warm:
        optimizer = getattr(co, name)([param], **options)
        param.grad = torch.ones_like(param)
        optimizer.step()
    before = compilations()

    model, twin = network(), network()
    optimizers = {param: getattr(co, name)([param], **options) for param in model.parameters()}

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    if entry.in_torch:
        reference = entry.reference(twin.parameters(), **options)
    else:
        reference = getattr(co, name)(twin.parameters(), **options, compile=False)
    for batch in batches(6):
        backward(model, batch)
        assert all(param.grad is None for param in model.parameters())
        backward(twin, batch)
        reference.step()
        reference.zero_grad()
    assert_close(values(model), values(twin), TOLERANCE)

    assert compilations() == before
    explanations = [optimizer.explain() for optimizer in optimizers.values()]
    assert {explanation.compile_seconds for explanation in explanations} == {0}
    assert {explanation.recompiles for explanation in explanations} == {0}
    assert {explanation.mode for explanation in explanations} == {"compiled"}
    units = {
        call.unit
        for optimizer in optimizers.values()
        for calls in optimizer._stepper._plan.calls().values()
        for call in calls
    }
    assert len(units) <= 2


def test_a_model_copied_with_its_optimizer_goes_on():
    """deepcopy copies model and optimizer together, and the copy continues the training."""
    model = network()
    optimizer = co.AdamW(model, lr=0.05)
    for batch in batches(3):
        backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()
    best, its_optimizer = copy.deepcopy((model, optimizer))
    reference = torch.optim.AdamW(copies(list(best.parameters())), lr=0.05)
    reference.load_state_dict(copy.deepcopy(its_optimizer.state_dict()))
    twins = reference.param_groups[0]["params"]
    for batch in batches(2):
        backward(best, batch)
        for param, twin in zip(best.parameters(), twins, strict=True):
            twin.grad = param.grad.clone()
        its_optimizer.step()
        reference.step()
        its_optimizer.zero_grad()
    assert_close(list(best.parameters()), twins, TOLERANCE)
    assert its_optimizer.explain().events == ()
