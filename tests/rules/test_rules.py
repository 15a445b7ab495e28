"""Behaviour of single optimizers beyond the formula that test_parity.py tests, and of all optimizers."""

from __future__ import annotations

import pytest
import torch
from adamp import AdamP as PublishedAdamP

import compiled_optim as co
from catalog import CATALOG, references
from tests.helpers import LARGE, assert_close, copies, gradients, parameters, slow_decay, train

SHAPES = [(), (5,), (6, 7), (3, 2, 4), (4, 3, 2, 2)]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 5e-6}


def test_adamp_agrees_with_the_published_package(compiled):
    """The package clamps norms to epsilon instead of adding epsilon, which differs only for norms near zero."""
    ours, theirs = parameters(SHAPES, torch.float64), parameters(SHAPES, torch.float64)
    options = {"weight_decay": 0.1, "nesterov": True}
    train(lambda p: co.AdamP(p, **options, compile=compiled), ours, schedule=slow_decay)
    train(lambda p: PublishedAdamP(p, **options), theirs, schedule=slow_decay)
    assert_close(ours, theirs, 1e-7)


def adamp_gradients():
    """A weight and a gradient for each view in which the projection can fire."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    noise = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    orthogonal = noise - p * ((noise * p).sum(1) / (p * p).sum(1))[:, None]
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    cancelling = p * (signs / (p * p).sum(1))[:, None]
    return {"channel": (p, orthogonal), "layer": (p, cancelling), None: (p, p.clone())}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("fires", ["channel", "layer", None])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed"])
def test_adamp_projects_in_each_view(fires, dtype, layout, compiled):
    value, grad = (x.to(dtype) for x in adamp_gradients()[fires])
    value, grad = value.view(4, 3, 2, 1), grad.view(4, 3, 2, 1)
    home = {
        "contiguous": lambda x: x.clone(),
        "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
        "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    }[layout]
    param = torch.nn.Parameter(home(value))
    optimizer = co.AdamP([param], lr=0.1, weight_decay=0.5, compile=compiled)
    memory = {}
    (expected,) = references.adamp(
        [value.double().numpy()], [grad.double().numpy()], [memory], 1, 0.1, weight_decay=0.5
    )
    assert memory["fired"] == fires
    param.grad = grad
    optimizer.step()
    assert_close([param], [torch.from_numpy(expected)], TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("weight", "grad", "trust"),
    [
        (torch.full((4,), 0.5), torch.ones(4), "ratio"),
        (torch.full((400,), 3.0), torch.ones(400), "clamped"),  # a weight norm of 60 counts as 10
        (torch.zeros(4), torch.ones(4), "one"),
        (torch.full((4,), 0.5), torch.zeros(4), "one"),
    ],
    ids=["ratio", "clamp at 10", "zero weights", "zero step"],
)
def test_lamb_trust(weight, grad, trust, compiled):
    param = torch.nn.Parameter(weight.clone())
    optimizer = co.Lamb([param], lr=0.1, compile=compiled)
    param.grad = grad
    optimizer.step()
    u = 0.1 * grad / ((0.001 * grad * grad).sqrt() + 1e-6)
    ratio = {"ratio": weight.norm() / u.norm(), "clamped": 10 / u.norm(), "one": 1.0}[trust]
    torch.testing.assert_close(param.detach(), weight - 0.1 * ratio * u, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["warmup_linear", "warmup_cosine", "warmup_constant", "warmup_poly"])
def test_bert_schedules_before_after_and_past_the_end(name, compiled):
    """The learning rate of each step, read off a parameter whose direction is known."""
    param = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    options = {"warmup": 0.25, "t_total": 8, "schedule": name, "weight_decay": 0.0, "max_grad_norm": -1}
    # b1 = b2 = 0: the direction is g / (|g| + e)
    optimizer = co.BertAdam([param], lr=1.0, b1=0.0, b2=0.0, e=0.0, **options, compile=compiled)
    for step in range(12):
        before = param.item()
        param.grad = torch.ones_like(param)
        optimizer.step()
        expected = references.bert_schedule(name, step / 8, 0.25)
        assert before - param.item() == pytest.approx(expected, abs=1e-12)
        assert optimizer.get_lr() == [pytest.approx(references.bert_schedule(name, (step + 1) / 8, 0.25), abs=1e-12)]


def test_bert_linear_without_warmup_starts_at_half():
    optimizer = co.BertAdam(parameters([(2,)]), lr=1.0, t_total=10, compile=False)
    assert optimizer.get_lr() == []
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones(2)
    assert optimizer.get_lr() == [0]
    assert optimizer.derived(optimizer.param_groups[0], 1)["lr"] == 0.5


def test_bert_resumes_its_schedule(compiled):
    def make(params):
        return co.BertAdam(params, lr=0.1, warmup=0.2, t_total=20, compile=compiled)

    whole, parted = parameters(SHAPES), parameters(SHAPES)
    train(make, whole, 10, schedule=None)
    first = make(parted)
    second = make(parted)
    for i, grads in enumerate(gradients(parted, 10)):
        if i == 5:
            second.load_state_dict(first.state_dict())
        for param, grad in zip(parted, grads, strict=True):
            param.grad = grad
        (first if i < 5 else second).step()
    assert_close(parted, whole, 1e-6)


def test_bert_clips_each_group_and_dtype_by_its_own_norm(compiled):
    """Two groups with a limit of their own, each of two dtypes: four norms."""
    groups = [
        {"params": parameters([(3,)]) + parameters([(4,)], torch.float64), "max_grad_norm": 0.5},
        {"params": parameters([(5,)]) + parameters([(2,)], torch.float64), "max_grad_norm": -1},
    ]
    optimizer = co.BertAdam(groups, lr=0.1, compile=compiled)
    expected = []
    for group in groups:
        for param in group["params"]:
            param.grad = torch.full_like(param, 2.0)
            (value,) = references.bert_adam(
                [param.detach().double().numpy()], [param.grad.double().numpy()], [{}], 1, 0.1,
                max_grad_norm=group["max_grad_norm"],
            )  # fmt: skip
            expected.append(torch.from_numpy(value))
    optimizer.step()
    assert_close([p for group in groups for p in group["params"]], expected, 5e-6)


def test_lamb_global_norm_is_over_all_groups_and_leaves_gradients_alone(compiled):
    params = parameters([(3,), (4,)])
    twins = copies(params)
    groups = [{"params": params[:1], "use_global_grad_norm": True}, {"params": params[1:]}]
    optimizer = co.Lamb(groups, lr=0.1, compile=compiled)
    reference = co.Lamb([{"params": twins[:1]}, {"params": twins[1:]}], lr=0.1, compile=False)
    for param, twin in zip(params, twins, strict=True):
        param.grad = torch.full_like(param, 2.0)
        twin.grad = param.grad.clone()
    twins[0].grad /= 28**0.5  # seven elements of 2
    optimizer.step()
    reference.step()
    assert_close(params, twins, 1e-6)
    assert torch.equal(params[0].grad, torch.full((3,), 2.0))
    assert optimizer.last_grad_norm.item() == pytest.approx(28**0.5)


@pytest.mark.parametrize("name", CATALOG)
def test_thirty_scheduled_steps_compile_nothing_new(name):
    from torch._dynamo.utils import counters

    params = parameters(SHAPES + LARGE)
    options = {**CATALOG[name].typical, "lr": 0.1}
    optimizer = getattr(co, name)(params, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    compiled = None
    for grads in gradients(params, 31):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
        scheduler.step()
        compiled = compiled or counters["aot_autograd"]["total"]
    assert counters["aot_autograd"]["total"] == compiled
    explanation = optimizer.explain()
    assert explanation.recompiles == 0
    many = getattr(co, name)(parameters((SHAPES + LARGE) * 5), **options)
    for param in many.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    many.step()
    assert many.explain().graphs == explanation.graphs, "five times the tensors, the same units"
    assert counters["aot_autograd"]["total"] == compiled


@pytest.mark.parametrize("name", ["AdamW", *(name for name, entry in CATALOG.items() if entry.sums)])
def test_two_runs_agree_bit_for_bit(name, compiled):
    """Sums over threads are deterministic: those of clipping, and the norms that a rule takes."""
    runs = [parameters(SHAPES + LARGE) for _ in range(2)]
    for params in runs:
        train(lambda p: getattr(co, name)(p, max_grad_norm=1.0, compile=compiled), params, 5)
    assert_close(*runs, 0)


@pytest.mark.parametrize("name", CATALOG)
def test_sparse_gradients_are_refused(name, compiled):
    params = parameters([(2, 2), (2, 2)])
    optimizer = getattr(co, name)(params, compile=compiled)
    params[0].grad = torch.ones(2, 2)
    params[1].grad = torch.ones(2, 2).to_sparse()
    alternative = f"torch.optim.{name}" if name in ("Adagrad", "SGD") else "SparseAdam"
    message = f"^{name} does not support sparse gradients, please consider {alternative} instead: "
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert_close(params, parameters([(2, 2), (2, 2)]), 0)
    assert not optimizer.state
    # the recommended optimizer takes the gradient
    getattr(torch.optim, alternative.removeprefix("torch.optim."))(params[1:], lr=0.1).step()
    assert not torch.equal(params[1], parameters([(2, 2), (2, 2)])[1])
