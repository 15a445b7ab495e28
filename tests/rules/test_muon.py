"""Muon against torch.optim.Muon and against the paper's formula in float64, and how it cuts parameters into matrices.

torch.optim.Muon iterates in bfloat16. In float64 our momentum agrees with torch's to the last bits, so the matrices in
bfloat16 are equal, and so are the products. In float32 torch computes the momentum with fused multiply-add. The last
bits differ, and a few elements are rounded to another bfloat16 number. With ``ns_dtype=torch.float64`` the iteration is
as accurate as the formula.
"""

from __future__ import annotations

import copy
import pickle
import re
from functools import partial

import pytest
import torch
from torch.nn import Parameter
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

import compiled_optim as co
from catalog import MATRICES
from catalog.references import Formula, muon
from compiled_optim import backends
from compiled_optim.engine import matrices, sorting
from tests.helpers import assert_close, distance, gradients, parameters, slow_decay, train

SHAPES = [(12, 8), (8, 12), (10, 10), (12, 8), (9, 30), (10, 10), (40, 30)]
"""No dimension is below 8: for smaller matrices, batched and single products of torch add in another order."""

TINY = [(1, 4), (3, 1), (5, 4), (0, 3), (1, 1)]
ENTRY = MATRICES["Muon"]
INFO = next(info for info in optim_db if info.name == "Muon")
EXACT = {"ns_dtype": torch.float64}

IDS = ["-".join(f"{k}={v}" for k, v in options.items()) or "default" for options in ENTRY.parity]


def run_both(shapes, dtype, ours, theirs, steps=20, **optimizer_options):
    own, other = parameters(shapes, dtype), parameters(shapes, dtype)
    return own, other, train(ours, own, steps, slow_decay), train(theirs, other, steps, slow_decay)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("options", ENTRY.parity, ids=IDS)
def test_agrees_with_torch(options, dtype, compiled):
    tolerance = dict(zip((torch.float64, torch.float32), ENTRY.tolerance, strict=True))[dtype]
    make = partial(co.Muon, **options, compile=compiled)
    shapes = SHAPES
    ours, theirs, optimizer, reference = run_both(shapes, dtype, make, partial(torch.optim.Muon, **options))
    assert_close(ours, theirs, tolerance)
    for p, q in zip(ours, theirs, strict=True):
        assert optimizer.state[p].keys() == reference.state[q].keys() == {"momentum_buffer"}
    buffers = [[each.state[p]["momentum_buffer"] for p in ps] for each, ps in ((optimizer, ours), (reference, theirs))]
    assert_close(*buffers, {torch.float64: 1e-12, torch.float32: 2e-6}[dtype])
    assert min(distance(p, q) for p, q in zip(ours, parameters(shapes, dtype), strict=True)) > 1e-3


@pytest.mark.parametrize("rms", [False, True])
def test_agrees_with_the_formula(rms, compiled):
    shapes = [shape for shape in SHAPES + TINY if 0 not in shape]
    options = {**EXACT, "adjust_lr_fn": "match_rms_adamw" if rms else None, "compile": compiled}
    ours, theirs, *_ = run_both(
        shapes, torch.float64, partial(co.Muon, **options), partial(Formula, formula=muon, rms=rms)
    )
    assert_close(ours, theirs, 1e-11)


@pytest.mark.parametrize("ns_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float32_is_as_accurate_as_its_iteration(ns_dtype, compiled):
    shapes = [(8, 5), (30, 40)]
    ours, theirs, *_ = run_both(
        shapes, torch.float32, partial(co.Muon, ns_dtype=ns_dtype, compile=compiled), partial(Formula, formula=muon)
    )
    assert_close(ours, theirs, {torch.float32: 2e-5, torch.bfloat16: 3e-2}[ns_dtype])


@pytest.mark.parametrize("case", INFO.optim_inputs_func("cpu"), ids=lambda case: case.desc)
def test_configurations_of_torchs_database(case, compiled):
    ours, theirs, *_ = run_both(
        SHAPES[:2],
        torch.float64,
        partial(co.Muon, **copy.deepcopy(case.kwargs), compile=compiled),
        partial(torch.optim.Muon, **copy.deepcopy(case.kwargs)),
        5,
    )
    assert_close(ours, theirs, 1e-12)


@pytest.mark.parametrize(
    "case", INFO.optim_error_inputs_func("cpu", torch.float32), ids=lambda c: c.optimizer_error_input.desc
)
def test_errors_of_torchs_database(case):
    given = case.optimizer_error_input
    if case.error_type is UserWarning:
        with pytest.warns(UserWarning, match=case.error_regex):
            co.Muon(given.params, **given.kwargs)
    elif case.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR:
        with pytest.raises(case.error_type, match=case.error_regex):
            co.Muon(given.params, **given.kwargs)
    else:
        optimizer = co.Muon(given.params, **given.kwargs)
        with pytest.raises(case.error_type, match=case.error_regex):
            optimizer.step()


@pytest.mark.parametrize(("arguments", "message"), ENTRY.refused)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        co.Muon([Parameter(torch.ones(2, 2))], **arguments)


def test_takes_the_arguments_of_torch_in_their_order():
    values = (0.1, 0.2, 0.3, False, (1.0, 2.0, 3.0), 1e-3, 2, "match_rms_adamw")
    params = [Parameter(torch.ones(2, 2))]
    theirs, ours = torch.optim.Muon(params, *values).defaults, co.Muon(params, *values).defaults
    assert ours == {**theirs, "maximize": False}
    assert co.Muon(params).defaults == {**torch.optim.Muon(params).defaults, "maximize": False}


def test_checkpoints_both_ways(compiled):
    whole, own, other = (parameters(SHAPES[:3], torch.float64) for _ in range(3))
    train(partial(torch.optim.Muon, lr=0.1), whole, 6, None)
    steps = list(gradients(whole, 6))

    def advance(optimizer, params, grads):
        for step in grads:
            for param, grad in zip(params, step, strict=True):
                param.grad = grad
            optimizer.step()
        return optimizer

    first = advance(torch.optim.Muon(own, lr=0.1), own, steps[:2])
    ours = co.Muon(own, compile=compiled)
    ours.load_state_dict(first.state_dict())
    advance(ours, own, steps[2:4])
    other = [Parameter(p.detach().clone()) for p in own]
    last = torch.optim.Muon(other)
    last.load_state_dict(ours.state_dict())
    advance(last, other, steps[4:])
    assert_close(other, whole, 1e-12)


# ---- how parameters are cut


def as_matrices(tensor, options):
    """Return the matrices of a tensor as the documentation describes them."""
    flat = tensor.flatten(0, options.get("batch_dims", 0)) if options.get("batch_dims") else tensor
    stack = flat.reshape(-1, *tensor.shape[options.get("batch_dims", 0) :])
    parts = options.get("split")
    found = []
    for matrix in stack:
        matrix = matrix.flatten(1)
        rows = len(matrix)
        sizes = [rows] if parts is None else [rows // parts] * parts if isinstance(parts, int) else parts
        found += matrix.split(sizes)
    return found


CUTS = [
    ((6, 2, 3, 3), {"flatten": True}),
    ((4, 6, 5), {"batch_dims": 1}),
    ((2, 3, 6, 5), {"batch_dims": 2}),
    ((3, 6, 2, 2), {"batch_dims": 1, "flatten": True}),
    ((12, 4), {"split": 3}),
    ((12, 4), {"split": (6, 3, 3)}),
    ((2, 12, 4), {"batch_dims": 1, "split": [2, 10]}),
]


@pytest.mark.parametrize("layout", ["contiguous", "permuted", "sliced"])
@pytest.mark.parametrize(("shape", "options"), CUTS, ids=str)
def test_cuts_parameters_into_matrices(shape, options, layout, compiled):
    value = parameters([shape], torch.float64)[0].detach()
    if layout == "permuted":
        value = value.permute(*reversed(range(len(shape)))).contiguous().permute(*reversed(range(len(shape))))
    elif layout == "sliced":
        value = torch.stack([value, value], -1)[..., 0]
    ours = [Parameter(value)]
    theirs = [Parameter(matrix.clone()) for matrix in as_matrices(value, options)]
    optimizer = co.Muon(ours, lr=0.1, **options, **EXACT, compile=compiled)
    reference = Formula(theirs, muon, lr=0.1)
    for (grad,) in gradients(ours, 4):
        ours[0].grad = grad
        for param, part in zip(theirs, as_matrices(grad, options), strict=True):
            param.grad = part
        optimizer.step()
        reference.step()
    assert_close(as_matrices(ours[0].detach(), options), theirs, 1e-11)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((4,), {}, "only supports 2D parameters.*use AdamW"),
        ((4, 2, 2), {}, "flatten=True.*batch_dims=1"),
        ((4, 4), {"batch_dims": 1}, "only supports 2D"),
        ((4, 4), {"split": 3}, "split=3 does not divide the 4 rows"),
        ((4, 4), {"split": (3, 2)}, r"split=\(3, 2\) does not divide"),
    ],
)
def test_names_a_parameter_that_is_no_matrix(shape, options, message):
    named = [("a.weight", Parameter(torch.ones(4, 3))), ("b.weight", Parameter(torch.ones(shape)))]
    groups = [{"params": named[:1]}, {"params": named[1:], **options}]
    with pytest.raises(ValueError, match=f"{message}.*b.weight"):
        co.Muon(groups)


@pytest.mark.parametrize("split", [0, -1, ()])
def test_an_invalid_split_is_refused(split):
    with pytest.raises(ValueError, match=r"Invalid split value: .*; use None, a number of parts"):
        co.Muon([Parameter(torch.ones(4, 4))], split=split, compile=False)


def test_names_a_parameter_that_is_no_matrix_any_more():
    param = Parameter(torch.ones(4, 3))
    optimizer = co.Muon([("a.weight", param)], compile=False)
    param.data = torch.ones(4, 3, 2)
    param.grad = torch.ones(4, 3, 2)
    with pytest.raises(ValueError, match=r"only supports 2D parameters.*a\.weight"):
        optimizer.step()


def test_large_models_are_stepped_in_parts(monkeypatch, compiled):
    """With tiny limits there are many buckets and stacks, which share one workspace."""
    expected = parameters(SHAPES + TINY, torch.float64)
    train(partial(co.Muon, compile=False), expected, 5)
    monkeypatch.setattr(sorting, "MATRIX_ELEMENTS", 250)
    monkeypatch.setattr(matrices, "CPU_STACK_ELEMENTS", 150)
    params = parameters(SHAPES + TINY, torch.float64)
    optimizer = train(partial(co.Muon, compile=compiled), params, 5)
    assert len(optimizer.explain().batches) > 2
    assert_close(params, expected, 1e-12)


def test_one_stack_for_each_shape(monkeypatch):
    sizes = []
    call = co.rules.muon.NewtonSchulz.__call__
    monkeypatch.setattr(
        co.rules.muon.NewtonSchulz, "__call__", lambda self, x: (sizes.append(x.shape), call(self, x))[1]
    )
    params = parameters([(4, 6), (6, 4), (4, 4), (4, 6), (6, 4), (4, 4), (4, 4)])
    train(co.Muon, params, 1)
    assert sorted(sizes) == [(3, 4, 4), (4, 4, 6)]


# ---- with the rest of the package


def test_absent_gradients(compiled):
    """Each parameter has gradients in other steps. A matrix without one stays as it is, with its momentum."""
    ours, theirs = (parameters(SHAPES[:6], torch.float64) for _ in range(2))
    optimizer, reference = co.Muon(ours, lr=0.1, compile=compiled), torch.optim.Muon(theirs, lr=0.1)
    for step, grads in enumerate(gradients(ours, 8)):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad = q.grad = None if step % (i + 2) == 1 else grads[i]
        optimizer.step()
        reference.step()
    assert_close(ours, theirs, 1e-12)


def test_hyperparameters_that_change(compiled):
    """Also those that no schedule changes: each step uses the numbers of its group, and compiles nothing."""
    ours, theirs = (parameters(SHAPES[:4], torch.float64) for _ in range(2))
    optimizer, reference = co.Muon(ours, lr=0.1, compile=compiled), torch.optim.Muon(theirs, lr=0.1)
    changes = [{}, {"lr": 0.2}, {"momentum": 0.5}, {"ns_steps": 2}, {"adjust_lr_fn": "match_rms_adamw"}]
    changes += [{"ns_coefficients": (2.0, -1.5, 0.5)}, {"eps": 10.0}, {"weight_decay": 0.5}]
    for change, grads in zip(changes, gradients(ours, len(changes)), strict=True):
        for each, params in ((optimizer, ours), (reference, theirs)):
            each.param_groups[0].update(change)
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            each.step()
        assert_close(ours, theirs, 1e-12)
    assert optimizer.explain().recompiles == 0


def test_clipping_and_maximize(compiled):
    ours, theirs = (parameters(SHAPES[:4], torch.float64) for _ in range(2))
    optimizer = co.Muon(ours, lr=0.1, max_grad_norm=0.5, maximize=True, compile=compiled)
    reference = torch.optim.Muon(theirs, lr=0.1)
    for step, grads in enumerate(gradients(ours, 4)):
        for p, q, grad in zip(ours, theirs, grads, strict=True):
            p.grad, q.grad = grad / (step + 1) ** 3, -grad / (step + 1) ** 3
        torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        optimizer.step()
        reference.step()
    assert_close(ours, theirs, 1e-5)  # the factor is computed in another order


def test_grad_scaler(compiled):
    ours, theirs = (parameters(SHAPES[:4]) for _ in range(2))
    optimizer = co.Muon(ours, lr=0.1, fused=True, compile=compiled)
    reference = co.Muon(theirs, lr=0.1, compile=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for step, grads in enumerate(gradients(ours, 4)):
        for p, q, grad in zip(ours, theirs, grads, strict=True):
            p.grad, q.grad = 4.0 * grad, grad
        if step == 2:
            ours[0].grad[0, 0] = torch.inf
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        if step == 2:
            scaler._scale.fill_(4.0)
        else:
            reference.step()
        scaler.update(4.0)
    assert_close(ours, theirs, 1e-6)


def test_follows_reallocated_parameters(compiled):
    ours, theirs = (parameters(SHAPES[:4], torch.float64) for _ in range(2))
    optimizer, reference = co.Muon(ours, lr=0.1, compile=compiled), torch.optim.Muon(theirs, lr=0.1)
    for step, grads in enumerate(gradients(ours, 4)):
        if step == 2:
            ours[1].data = ours[1].data.clone()
        for p, q, grad in zip(ours, theirs, grads, strict=True):
            p.grad = q.grad = grad
        optimizer.step()
        reference.step()
    assert_close(ours, theirs, 1e-12)
    assert len(optimizer.explain().events) == 1
    raising = co.Muon(ours, on_realloc="raise", compile=compiled)
    raising.step()
    ours[0].data = ours[0].data.clone()
    with pytest.raises(co.ReallocationError, match="parameter 0"):
        raising.step()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies(copied):
    params = parameters(SHAPES[:4])
    optimizer = train(partial(co.Muon, compile=False), params, 3)
    other = copied(optimizer)
    for each in (optimizer, other):
        for param, grad in zip(each.param_groups[0]["params"], next(gradients(params, 1)), strict=True):
            param.grad = grad
        each.step()
    assert_close(other.param_groups[0]["params"], params, 0.0)


def test_steps_during_backward():
    """The stacks are those of the parameters that are stepped together."""
    nets = [
        torch.nn.Sequential(torch.nn.Linear(8, 12, False), torch.nn.Linear(12, 8, False)).double() for _ in range(2)
    ]
    nets[1].load_state_dict(nets[0].state_dict())
    ours = co.Muon(nets[0].parameters(), lr=0.1, in_backward=True, compile=False)
    theirs = torch.optim.Muon(nets[1].parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for net, optimizer in zip(nets, (ours, theirs), strict=True):
            net(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(list(nets[0].parameters()), list(nets[1].parameters()), 1e-12)


@pytest.mark.parametrize(
    ("state_dtype", "compiled"),
    [(torch.bfloat16, True), (torch.bfloat16, False), ({"momentum_buffer": torch.float16}, False)],
    ids=str,
)
def test_momentum_in_another_dtype(state_dtype, compiled):
    ours, theirs = (parameters([(40, 30), (8, 5)]) for _ in range(2))
    optimizer = train(partial(co.Muon, state_dtype=state_dtype, compile=compiled), ours)
    train(partial(co.Muon, compile=False), theirs)
    expected = state_dtype["momentum_buffer"] if isinstance(state_dtype, dict) else state_dtype
    assert {optimizer.state[p]["momentum_buffer"].dtype for p in ours} == {expected}
    assert_close(ours, theirs, 3e-2)


def test_momentum_in_8_bits():
    """Quantised momentum is close to that in float32: what differs is the rounding of the direction."""
    ours, theirs = (parameters([(80, 60)]) for _ in range(2))
    optimizer = train(partial(co.Muon, state_dtype="8bit", compile=False), ours, 5)
    train(partial(co.Muon, compile=False), theirs, 5)
    assert optimizer.state[ours[0]]["momentum_buffer"].dtype == torch.uint8
    assert_close(ours, theirs, 0.1)


def test_average_of_the_weights():
    (param,) = parameters([(8, 5)])
    optimizer = co.Muon([param], lr=0.1, ema_decay=0.5, compile=False)
    average = None
    for (grad,) in gradients([param], 3):
        param.grad = grad
        optimizer.step()
        value = param.detach().clone()
        average = value if average is None else 0.5 * average + 0.5 * value
    assert_close([optimizer.state[param]["ema"]], [average], 1e-6)


def test_clips_each_gradient_by_its_own_norm():
    params, twins = parameters([(3, 2), (5, 4)]), parameters([(3, 2), (5, 4)])
    optimizer = co.Muon(params, lr=0.1, max_grad_norm_per_parameter=0.5, compile=False)
    reference = torch.optim.Muon(twins, lr=0.1)
    for grads in gradients(params, 4):
        for param, twin, grad in zip(params, twins, grads, strict=True):
            param.grad, twin.grad = grad, grad.clone()
            torch.nn.utils.clip_grad_norm_([twin], 0.5)
        optimizer.step()
        reference.step()
    # the momentum shows it; the map returns matrices of the same size for any size of the gradient
    momenta = [
        [each.state[p]["momentum_buffer"] for p in own] for each, own in ((optimizer, params), (reference, twins))
    ]
    assert_close(*momenta, 1e-6)
    assert_close(params, twins, 1e-3)


def test_low_precision_parameters(compiled):
    """bfloat16 parameters are rounded once in a step, so they are closer to float64 than those of torch."""
    start = [p.detach().bfloat16() for p in parameters([(40, 30), (30, 40)])]
    ours, theirs, exact = (
        [Parameter(p.to(dtype)) for p in start] for dtype in (torch.bfloat16,) * 2 + (torch.float64,)
    )
    train(partial(co.Muon, compile=compiled), ours)
    train(torch.optim.Muon, theirs)
    train(torch.optim.Muon, exact)
    for own, other, truth in zip(ours, theirs, exact, strict=True):
        assert distance(own, truth) <= max(1.2 * distance(other, truth), 1e-2)


def test_a_checkpoint_of_torch_keeps_the_options_of_a_group(compiled):
    params = parameters([(6, 4)])
    reference = torch.optim.Muon(params)
    for param, grad in zip(params, next(gradients(params, 1)), strict=True):
        param.grad = grad
    reference.step()
    optimizer = co.Muon([{"params": params, "split": 2, "ns_dtype": torch.float64}], compile=compiled)
    optimizer.load_state_dict(reference.state_dict())
    assert optimizer.param_groups[0]["split"] == 2
    assert optimizer.param_groups[0]["ns_dtype"] == torch.float64
    optimizer.step()


def test_only_matrices_with_a_gradient_are_read_and_written(monkeypatch):
    """By the function that the backend makes. The others are nan, and stay so; the last one is tall."""
    memory = torch.full((7, 2, 3), float("nan"))
    present = [True, False, True, True, False, True, False]
    for i, is_present in enumerate(present):
        memory[i] = i if is_present else float("nan")
    sources = [
        matrices.Source(memory[:5], (5, 2, 3), [0, 1, 2, 3, 4]),
        matrices.Source(memory[5:].view(2, 3, 2), (2, 3, 2), [5, 6], 2.0),
    ]
    backend, calls = backends.get("eager"), []

    def lower_map(function, stack):
        calls.append(stack.shape)
        return function

    monkeypatch.setattr(backend, "lower_map", lower_map)
    stack = matrices.Stack(sources)
    stack.map(lambda given: given + 1, backend, present)
    assert calls == [(4, 2, 3)]
    for i, value in enumerate([1.0, None, 3.0, 4.0, None, 12.0, None]):
        expected = float("nan") if value is None else value
        torch.testing.assert_close(memory[i], torch.full((2, 3), expected), equal_nan=True)
    stack.map(lambda given: given + 1, backend, [False] * 7)
    assert len(calls) == 1
