"""Flat buffers (``layout="flat"``), with the eager backend: values, checkpoints, copies, and what leaves a buffer."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn

import compiled_optim as co
from catalog import CATALOG
from compiled_optim.engine import flat_memory
from compiled_optim.engine.flat_layout import ALIGNMENT, CHUNKS, WIDTH, FlatLayout
from compiled_optim.engine.flat_memory import VISITS
from tests.engine.formulas import FormulaOfEach
from tests.helpers import SMALL, assert_close, assert_same_state, copies, gradients, parameters, run_python, train

FLAT = dict(compile=False, layout="flat")
SHAPES = [*SMALL, (3000,), (20, 70)]
CASES = [(name, options) for name, entry in CATALOG.items() for options in entry.parity]


def is_flat(optimizer):
    return any(", flat" in unit for batch in optimizer.explain().batches for unit in batch.units)


def storages(tensors):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def step(model, optimizer, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()


@pytest.mark.parametrize(("name", "options"), CASES)
def test_same_as_the_reference(name, options):
    entry = CATALOG[name]
    params = parameters([shape for shape in SHAPES if entry.steps_empty or 0 not in shape], torch.float64)
    twins = copies(params)
    # "raise": moving parameters into the buffers is not reported
    ours = train(lambda p: getattr(co, name)(p, **options, **FLAT, on_realloc="raise"), params)
    train(lambda p: entry.reference(p, **options), twins)
    assert_close(params, twins, entry.tolerance[0])
    assert is_flat(ours) is not ours.sums_over_all, "sums over all parameters are computed for lists of tensors"
    if is_flat(ours):
        assert len(storages(p for p in params if p.ndim == 1 and p.numel())) == 1, "they lie in one buffer"


@pytest.mark.parametrize("name", CATALOG)
def test_bfloat16_as_without_buffers(name):
    params = parameters(SHAPES, torch.bfloat16)
    twins = copies(params)
    train(lambda p: getattr(co, name)(p, **CATALOG[name].typical, **FLAT), params, 5)
    train(lambda p: getattr(co, name)(p, **CATALOG[name].typical, compile=False), twins, 5)
    assert_close(params, twins, 1e-6)


@pytest.mark.parametrize("name", ["Lamb", "AdamP", "AdamW"])
def test_padding_that_is_nan_has_no_effect(name):
    """With eps=0, padding is 0/0. It stays NaN, and norms leave it out."""
    params = parameters([(8, 5), (7,), (100,)], torch.float64)
    twins = copies(params)
    options = dict(lr=0.1, weight_decay=0.1, eps=0.0)
    ours = train(lambda p: getattr(co, name)(p, **options, **FLAT, max_grad_norm=1.0), params, 6)
    theirs = train(lambda p: getattr(co, name)(p, **options, compile=False, max_grad_norm=1.0), twins, 6)
    assert is_flat(ours)
    assert_close(params, twins, 1e-12)
    torch.testing.assert_close(ours.last_grad_norm, theirs.last_grad_norm, rtol=1e-12, atol=0)


def test_state_dict_holds_plain_tensors():
    params = parameters([(1000,), (3,)])
    optimizer = train(lambda p: co.AdamW(p, **FLAT), params, 3)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        for tensor in state.values():
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    small = io.BytesIO()
    torch.save(saved["state"][1], small)
    assert len(small.getvalue()) < 4000, "the buffer is not saved with a small state"
    before = copy.deepcopy(saved)
    train(lambda p: optimizer, params, 1)
    assert_same_state(saved, before)
    twin = co.AdamW(copies(params), **FLAT)
    twin.load_state_dict(optimizer.state_dict())
    assert_same_state(twin.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_have_their_own_memory(how):
    model = net()
    optimizer = co.AdamW(model, lr=0.1, **FLAT)
    step(model, optimizer)
    pair = copy.deepcopy((model, optimizer)) if how == "deepcopy" else pickle.loads(pickle.dumps((model, optimizer)))
    twin, other = pair
    assert not storages(twin.parameters()) & storages(model.parameters())
    if how == "deepcopy":
        other.on_realloc = "raise"
    for state in other.state.values():
        assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in state.values())
    for seed in (1, 2):
        step(model, optimizer, seed)
        step(twin, other, seed)
        # pickled parameters are views of one tensor, which may belong to others
        assert is_flat(other) == (how == "deepcopy")
        assert bool(other.explain().advice) == (how == "pickle")
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("assign", [False, True])
def test_the_model_loads_a_checkpoint(assign):
    model = net()
    twin = copy.deepcopy(model)
    optimizer, other = co.AdamW(model, lr=0.1, **FLAT), torch.optim.AdamW(twin.parameters(), lr=0.1)
    step(model, optimizer)
    values = {name: tensor.clone() for name, tensor in net(1).state_dict().items()}
    model.load_state_dict(values, assign=assign)
    if assign:  # new objects, which have new states
        twin.load_state_dict({name: tensor.clone() for name, tensor in values.items()}, assign=True)
        other = torch.optim.AdamW(twin.parameters(), lr=0.1)
    else:
        step(twin, other)
        twin.load_state_dict(values)
    for seed in (1, 2):
        step(model, optimizer, seed)
        step(twin, other, seed)
    assert_close(list(model.parameters()), list(twin.parameters()), 1e-6)
    assert len(optimizer.explain().events) == (4 if assign else 0)


def step_some(params, twins, ours, theirs, is_absent, clip=None, seed=0, steps=12):
    """Step two optimizers with the same gradients, some of them None; return the memory of all tensors of ours."""
    places = []
    for i, grads in enumerate(gradients(params, steps, seed=seed)):
        for k, (p, q, grad) in enumerate(zip(params, twins, grads, strict=True)):
            p.grad, q.grad = (None, None) if is_absent(i, k) else (grad.clone(), grad.clone())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([q for q in twins if q.grad is not None], clip)
        ours.step()
        theirs.step()
        kept = [value for p in params for name, value in ours.state[p].items() if name not in ("step", "mu_product")]
        places.append([tensor.data_ptr() for tensor in (*params, *kept)])
    return places


SUBSETS = {
    "others each time": lambda i, k: i > 0 and (i >> k) % 3 == 1,
    "few": lambda i, k: i > 0 and k != i % 4,
    "one is absent once": lambda i, k: (i, k) == (1, 0),
}


@pytest.mark.parametrize("subsets", SUBSETS)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "NAdam", "Lamb", "AdamP"])
def test_gradients_that_come_and_go_move_nothing(name, subsets):
    """An absent gradient leaves its parameter and states alone. Seven steps are too few to move what is apart."""
    params = parameters([(300,), (5, 4), (7,), (2000,)], torch.float64)
    twins = copies(params)
    options = {"lr": 0.1, **CATALOG[name].typical}
    ours = getattr(co, name)(params, **options, max_grad_norm=1.0, **FLAT, on_realloc="raise")
    theirs = (
        CATALOG[name].reference(twins, **options)
        if CATALOG[name].in_torch
        else FormulaOfEach(twins, CATALOG[name], **options)
    )
    places = step_some(params, twins, ours, theirs, SUBSETS[subsets], clip=1.0, steps=7)
    assert is_flat(ours)
    assert_close(params, twins, 1e-9)
    if CATALOG[name].in_torch:
        for p, q in zip(params, twins, strict=True):
            names = [name for name, value in theirs.state[q].items() if value is not None]
            assert_close([ours.state[p][name] for name in names], [theirs.state[q][name] for name in names], 1e-9)
    assert places[1:] == places[:-1]


def test_parameters_that_stay_apart_move_once():
    """One gradient is absent once. After some steps its parameter gets a buffer of its own, and then nothing moves."""
    params = parameters([(300,), (700,), (2000,)], torch.float64)
    twins = copies(params)
    ours, theirs = co.AdamW(params, lr=0.1, **FLAT, on_realloc="raise"), torch.optim.AdamW(twins, lr=0.1)
    places = step_some(params, twins, ours, theirs, lambda i, k: (i, k) == (1, 0), steps=VISITS + 6)
    moves = [i for i in range(1, len(places)) if places[i] != places[i - 1]]
    assert moves == [2 + VISITS]
    assert [a == b for a, b in zip(places[0], places[-1], strict=True)][:3] == [False, True, True]
    again = step_some(params, twins, ours, theirs, lambda i, k: i % 2 and k == 0, seed=1)
    assert again == [places[-1]] * 12, "also if its gradient comes and goes"
    assert_close(params, twins, 1e-12)


def test_most_of_a_buffer_that_is_not_used_is_given_back():
    """All large parameters leave it, so the small one gets memory of its own."""
    params = parameters([(5000,), (3,)])
    optimizer = train(lambda p: co.AdamW(p, **FLAT), params, 2)
    buffer = params[1].untyped_storage().nbytes()
    values = params[1].detach().clone()
    params[0].data = params[0].data.double()
    params[0].grad, params[1].grad = torch.ones(5000, dtype=torch.float64), None
    optimizer.step()
    assert params[1].untyped_storage().nbytes() == 12 < buffer
    assert optimizer.state[params[1]]["exp_avg"].untyped_storage().nbytes() == 12
    assert torch.equal(params[1], values)


def test_a_parameter_that_was_removed_stays_as_it_is():
    params = parameters([(300,), (5,)])
    optimizer = train(lambda p: co.AdamW([{"params": p[:1]}, {"params": p[1:]}], **FLAT), params, 2)
    optimizer = train(lambda p: co.AdamW(p, **FLAT), params, 2)
    values = params[1].detach().clone()
    optimizer.param_groups[0]["params"].pop()
    train(lambda p: optimizer, params[:1], 2)
    assert torch.equal(params[1], values)


def test_a_state_in_the_place_of_a_parameter_that_has_left():
    """Two absent parameters have exchanged their states, and one of them is no longer in the buffer."""
    params = parameters([(9,), (3,), (3,)], torch.float64)
    optimizer = train(lambda p: co.AdamW(p, lr=0.1, **FLAT), params, 2)
    twins = copies(params)
    other = co.AdamW(twins, lr=0.1, compile=False)
    other.load_state_dict(optimizer.state_dict())
    for own, opt in ((params, optimizer), (twins, other)):
        a, b, c = own
        opt.state[b]["exp_avg"], opt.state[c]["exp_avg"] = opt.state[c]["exp_avg"], opt.state[b]["exp_avg"]
        c.data = c.data.clone()
        for count in (1, 3):
            for p in own:
                p.grad = torch.ones_like(p) if p is a or count == 3 else None
            opt.step()
    assert_close(params, twins, 1e-12)


def test_add_param_group_and_a_new_optimizer_over_the_same_parameters():
    params = parameters([(30,), (4, 5), (6,)], torch.float64)
    twins = copies(params)
    for own, options in ((params, FLAT), (twins, {"compile": False})):
        optimizer = co.Adan(own[:2], lr=0.1, **options)
        train(lambda p, optimizer=optimizer: optimizer, own[:2], 2)
        optimizer.add_param_group({"params": [own[2]], "lr": 0.2})
        train(lambda p, optimizer=optimizer: optimizer, own, 2, schedule=None)
    again = train(lambda p: co.Lion(p, lr=0.1, **FLAT), params, 2)
    train(lambda p: co.Lion(p, lr=0.1, compile=False), twins, 2)
    assert is_flat(again), "they are taken out of the buffers of the first optimizer"
    assert_close(params, twins, 1e-12)


def test_two_optimizers_over_the_same_parameters():
    """Each moves the parameters into its own buffers, which is no reallocation; what a user does still is."""
    params = parameters([(300,), (5, 4)], torch.float64)
    twins = copies(params)
    ours = [co.AdamW(params, lr=0.1, **FLAT, on_realloc="raise"), co.SGD(params[:1], lr=0.1, **FLAT)]
    theirs = [torch.optim.AdamW(twins, lr=0.1), torch.optim.SGD(twins[:1], lr=0.1)]
    for i, grads in enumerate(gradients(params, 6)):
        for p, q, grad in zip(params, twins, grads, strict=True):
            p.grad, q.grad = grad.clone(), grad.clone()
        ours[i % 2].step()
        theirs[i % 2].step()
    assert_close(params, twins, 1e-12)
    assert not any(optimizer.explain().events for optimizer in ours)
    params[0].data = params[0].data.clone()
    with pytest.raises(co.ReallocationError, match="storage changed"):
        ours[0].step()


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused):
    params = parameters([(30,), (4, 5)])
    twins = copies(params)
    options = dict(lr=0.1, max_grad_norm=1.0, fused=fused)
    ours, theirs = co.AdamW(params, **options, **FLAT), co.AdamW(twins, **options, compile=False)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for i, grads in enumerate(gradients(params, 4)):
        for own, optimizer, scaler in ((params, ours, scalers[0]), (twins, theirs, scalers[1])):
            for p, grad in zip(own, grads, strict=True):
                p.grad = grad * 1024 * (math.inf if i == 2 else 1)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
    assert is_flat(ours)
    assert_close(params, twins, 1e-7)
    assert_close([p.grad for p in params], [p.grad for p in twins], 1e-7)


def test_gradients_of_other_dtypes_and_strides():
    params = parameters([(6, 4), (8,)], torch.float64)
    twins = copies(params)
    ours, theirs = co.AdamW(params, lr=0.1, **FLAT), torch.optim.AdamW(twins, lr=0.1)
    for own in (params, twins):
        own[0].grad = torch.arange(24.0, dtype=torch.float64).view(4, 6).t()
        own[1].grad = torch.arange(16.0, dtype=torch.float64)[::2]
    ours.step()
    theirs.step()
    assert_close(params, twins, 1e-14)


def test_strides_are_kept():
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    twin = nn.Parameter(weight.detach().clone())
    ours = train(lambda p: co.AdamP(p, lr=0.1, **FLAT), [weight], 3)
    train(lambda p: co.AdamP(p, lr=0.1, compile=False), [twin], 3)
    assert is_flat(ours)
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert_close([weight], [twin], 1e-6)


def test_what_does_not_fit_is_stepped_where_it_is():
    base = torch.randn(40)
    view = nn.Parameter(base[:10])
    overlapping = nn.Parameter(base[5:15])
    scattered = nn.Parameter(torch.randn(5, 8)[:, ::2])
    number = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    params = [view, overlapping, scattered, number]
    before = [p.data_ptr() for p in params]
    optimizer = train(lambda p: co.SGD(p, lr=0.1, **FLAT), params, 2)
    assert not is_flat(optimizer)
    assert [p.data_ptr() for p in params] == before
    assert torch.equal(base[:10], view), "it still is a view of its base"


class Normalized(co.Optimizer):
    """A rule of a user that sums with plain torch, tensor by tensor."""

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, dict(lr=lr), **options)

    @staticmethod
    def update(p, g, *, lr, all_reduce):
        (squares,) = all_reduce(co.Tensors(grad.square().sum() for grad in g))
        p -= lr * (g / co.Tensors(square.sqrt() for square in squares))


def test_a_rule_that_does_not_work_on_a_buffer():
    params = parameters([(30,), (4, 5)], torch.float64)
    expected = [p.detach() - 0.1 * torch.ones_like(p) / p.numel() ** 0.5 for p in params]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = Normalized(params, **FLAT)
    optimizer.step()
    assert not is_flat(optimizer)
    assert_close(params, expected, 1e-12)


def test_a_kept_state_tensor_that_is_pointed_elsewhere():
    params = parameters([(3,), (3,)])
    optimizer = train(lambda p: co.SGD(p, lr=0.1, momentum=0.9, **FLAT), params, 1)
    state = optimizer.state[params[0]]["momentum_buffer"]
    state.data = torch.full((3,), 5.0)
    (optimizer.state[params[1]]["momentum_buffer"]).zero_()
    for p in params:
        p.grad = torch.zeros(3)
    before = [p.detach().clone() for p in params]
    optimizer.step()
    torch.testing.assert_close(params[0], before[0] - optimizer.param_groups[0]["lr"] * 4.5)
    assert torch.equal(params[1], before[1])


def test_swapped_parameters_and_states():
    params = parameters([(3,), (3,)], torch.float64)
    optimizer = train(lambda p: co.AdamW(p, lr=0.1, **FLAT), params, 2)
    twins = copies(params)
    other = co.AdamW(twins, lr=0.1, compile=False)
    other.load_state_dict(optimizer.state_dict())
    for own, opt in ((params, optimizer), (twins, other)):
        a, b = own
        a.data, b.data = b.data, a.data
        opt.state[a]["exp_avg"], opt.state[b]["exp_avg"] = opt.state[b]["exp_avg"], opt.state[a]["exp_avg"]
        train(lambda p, opt=opt: opt, own, 2)
    assert_close(params, twins, 1e-12)


def test_options():
    with pytest.raises(ValueError, match="Invalid layout value: 'list'"):
        co.AdamW(parameters([(2,)]), layout="list")
    with pytest.raises(ValueError, match=r"layout='flat' for parameters on cpu: backend 'cpu' supports 'tensors'; use"):
        co.AdamW(parameters([(2,)]), layout="flat")
    assert co.AdamW(parameters([(2,)]), **FLAT).layout == "flat"


@pytest.mark.parametrize("sizes", [[1], [128, 1], [CHUNKS[-1], 1], [5 * CHUNKS[-2] + 3], [CHUNKS[0] + 1, 7]])
def test_chunks_cover_the_buffer(sizes):
    place = FlatLayout.in_chunks(sizes)
    assert {length for (length,) in place.parts} <= set(CHUNKS)
    assert all(offset % ALIGNMENT == 0 for offset in place.offsets)
    end = place.offsets[-1] + sizes[-1]
    assert end <= place.length < end + CHUNKS[-1] + ALIGNMENT
    assert max(place.parts.count((length,)) for length in CHUNKS[1:]) <= 4


@pytest.mark.parametrize("width", [None, 3, 256, 1000])
def test_rows_of_a_matrix(width):
    sizes = [2000, 1, 5000] if width is None else [2 * width, width, 7 * width]
    place = FlatLayout.as_matrix(sizes, width)
    ((rows, columns),) = place.parts
    assert columns == (width or WIDTH)
    numbers = torch.tensor(place.row_segments())
    owners = torch.full((place.length,), place.segments - 1)
    for i, (size, offset) in enumerate(zip(sizes, place.offsets, strict=True)):
        owners[offset : offset + size] = i
    inside = torch.arange(columns) < torch.tensor(place.row_sizes()).unsqueeze(1)
    assert torch.equal(owners.view(rows, columns)[inside], numbers.unsqueeze(1).expand(rows, columns)[inside])
    assert int(inside.sum()) == sum(sizes)


INTERRUPTED = """
import torch
import compiled_optim as co
from compiled_optim.engine.flat_memory import FlatMemory

params = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
optimizer = co.SGD(params, lr=0.5, momentum=0.9, compile=False, layout="flat", on_realloc="raise")
settle = FlatMemory.settle
def interrupted(*args):
    raise KeyboardInterrupt
for p in params:
    p.grad = torch.ones(3)
FlatMemory.settle = interrupted
try:
    optimizer.step()
except KeyboardInterrupt:
    print("interrupted")
FlatMemory.settle = settle
optimizer.step()
print(params[0].tolist(), optimizer.explain().events)
"""


def test_an_interrupt_after_parameters_were_moved():
    assert run_python(INTERRUPTED) == "interrupted\n[0.5, 0.5, 0.5] ()\n"


def test_a_parameter_without_memory_may_have_the_id_of_a_former_one(monkeypatch):
    net = torch.nn.Sequential(torch.nn.LazyLinear(4))
    sparse = torch.eye(3).to_sparse().requires_grad_()
    params = [*net.parameters(), sparse]
    monkeypatch.setattr(flat_memory, "_placed", {id(param): 1 for param in params})
    optimizer = co.AdamW(params, compile=False)
    optimizer.step()
    assert not optimizer.explain().events
