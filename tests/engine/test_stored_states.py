"""Options ``state_dtype``, ``rounding`` and ``master_weights``: results, checkpoints, copies, the guard and errors.

Results are compared with torch.optim in float32 or float64, on the same gradients.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import subprocess
import sys
import warnings

import pytest
import torch

import compiled_optim as co
from compiled_optim.engine.stored_states import SCALE
from tests.helpers import TIMEOUT

SHAPES = ((64, 80), (100, 77), (7,), (130, 3, 3, 5))
EIGHT_BIT = {"state_dtype": "8bit"}
BF16_STATES = {"state_dtype": torch.bfloat16}
STORAGES = {
    "bf16 states": (torch.float32, BF16_STATES),
    "fp16 states": (torch.float32, {"state_dtype": torch.float16}),
    "8-bit states": (torch.float32, EIGHT_BIT),
    "by name": (torch.float32, {"state_dtype": {"exp_avg": torch.bfloat16, "exp_avg_sq": "8bit"}}),
    "stochastic": (torch.bfloat16, {"rounding": "stochastic"}),
    "stochastic, 8-bit": (torch.bfloat16, {"rounding": "stochastic", **EIGHT_BIT}),
    "kahan": (torch.bfloat16, {"rounding": "kahan"}),
    "kahan, float16": (torch.float16, {"rounding": "kahan"}),
    "master weights": (torch.bfloat16, {"master_weights": True}),
    "master weights, 8-bit": (torch.float16, {"master_weights": True, **EIGHT_BIT}),
}
every_storage = pytest.mark.parametrize(("dtype", "options"), STORAGES.values(), ids=STORAGES)


def make_params(dtype=torch.float32, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_grads(params, step):
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        values = torch.randn(param.shape, generator=generator) * torch.rand(param.shape, generator=generator)
        param.grad = (0.1 * values).to(param.dtype)


def train(optimizer, params, steps, first=0):
    for step in range(first, first + steps):
        set_grads(params, step)
        optimizer.step()


def reference(steps, make=torch.optim.AdamW, **options):
    params = [torch.nn.Parameter(param.detach().to(torch.bfloat16).double()) for param in make_params()]
    optimizer = make(params, **options)
    for step in range(steps):
        shadows = make_params()
        set_grads(shadows, step)
        for param, shadow in zip(params, shadows, strict=True):
            param.grad = shadow.grad.double()
        optimizer.step()
    return params


def distance(params, expected):
    """Return the largest RMS difference of a parameter from the expected one."""
    pairs = zip(params, expected, strict=True)
    return max((a.detach().double() - b.detach().double()).square().mean().sqrt().item() for a, b in pairs)


def snapshot(optimizer, params):
    tensors = {(i, "p"): param.detach().clone() for i, param in enumerate(params)}
    for i, param in enumerate(params):
        tensors |= {(i, name): value.clone() for name, value in optimizer.state[param].items()}
    return tensors


def assert_same(first, second):
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert tensor.dtype == second[key].dtype, key
        assert torch.equal(tensor, second[key]), key


@every_storage
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_results_are_close_to_float64(dtype, options, compiled):
    steps, lr = 30, 1e-2
    params = make_params(torch.bfloat16)
    params = [torch.nn.Parameter(param.detach().to(dtype)) for param in params]
    optimizer = co.AdamW(params, lr=lr, compile=compiled, **options)
    train(optimizer, params, steps)
    expected = reference(steps, lr=lr)
    # the weights have moved by about 0.1; a bfloat16 weight of 1 is rounded by 0.002
    moved = distance(make_params(), expected)
    tolerance = 0.3 if options.get("rounding") == "stochastic" else 0.15
    assert distance(params, expected) < tolerance * moved


@every_storage
def test_compiled_steps_agree_with_eager_ones(dtype, options):
    params = make_params(dtype)
    optimizer = co.AdamW(params, lr=1e-2, **options)
    train(optimizer, params, 3)
    set_grads(params, 3)
    with optimizer.compare_eager() as comparison:
        optimizer.step()
    assert comparison.largest < (3e-3 if dtype == torch.float32 else 2.0**-5)


@every_storage
@pytest.mark.parametrize("through", ["state_dict", "file", "pickle", "deepcopy"])
def test_training_resumes_with_the_same_bits(dtype, options, through):
    params = make_params(dtype)
    optimizer = co.AdamW(params, lr=1e-2, compile=False, **options)
    train(optimizer, params, 3)
    if through == "deepcopy":
        others, other = copy.deepcopy((params, optimizer))
    elif through == "pickle":
        others, other = pickle.loads(pickle.dumps((params, optimizer)))
    else:
        saved = copy.deepcopy(optimizer.state_dict())  # loading shares tensors, as in torch
        if through == "file":
            file = io.BytesIO()
            torch.save(saved, file)
            saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        others = [torch.nn.Parameter(param.detach().clone()) for param in params]
        other = co.AdamW(others, lr=1e-2, compile=False, **options)
        other.load_state_dict(saved)
    train(optimizer, params, 3, first=3)
    train(other, others, 3, first=3)
    assert_same(snapshot(optimizer, params), snapshot(other, others))


def test_another_seed_rounds_differently_and_the_same_seed_alike():
    results = []
    for seed in (0, 0, 1):
        params = make_params(torch.bfloat16)
        optimizer = co.AdamW(params, rounding="stochastic", rounding_seed=seed, compile=False)
        train(optimizer, params, 2)
        results.append(torch.cat([param.detach().view(-1) for param in params]))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_eight_bit_states_take_two_bytes_and_small_tensors_float32():
    params = make_params()
    optimizer = co.AdamW(params, compile=False, **EIGHT_BIT)
    train(optimizer, params, 1)
    big, small = optimizer.state[params[0]], optimizer.state[params[2]]
    assert big["exp_avg"].dtype == torch.uint8
    assert big["exp_avg"].shape == params[0].shape
    assert big["exp_avg" + SCALE].shape == (40,)
    assert small["exp_avg"].dtype == torch.float32
    assert "exp_avg" + SCALE not in small
    used = sum(big[name].nbytes for name in big if name != "step")
    assert used / params[0].numel() <= 2.2
    report = optimizer.explain().bytes_per_element
    assert 1 < report["exp_avg"] < 1.1
    assert 0.03 < report["exp_avg_scale"] < 0.04
    assert "exp_avg_sq_scale 0.03" in str(optimizer.explain())


def test_checkpoints_of_torch_load_into_eight_bit_and_back():
    params = make_params()
    theirs = torch.optim.AdamW(params, lr=1e-2)
    train(theirs, params, 5)
    others = [torch.nn.Parameter(param.detach().clone()) for param in params]
    ours = co.AdamW(others, lr=1e-2, compile=False, **EIGHT_BIT)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    train(theirs, params, 3, first=5)
    train(ours, others, 3, first=5)
    assert distance(others, params) < 2e-3
    assert ours.state[others[0]]["exp_avg"].dtype == torch.uint8

    full = ours.full_state_dict()
    assert {value.dtype for value in full["state"][0].values()} == {torch.float32}
    back = torch.optim.AdamW([torch.nn.Parameter(param.detach().clone()) for param in others], lr=1e-2)
    back.load_state_dict(full)
    again = co.AdamW([torch.nn.Parameter(param.detach().clone()) for param in others], compile=False, **EIGHT_BIT)
    again.load_state_dict(copy.deepcopy(back.state_dict()))
    ends = back.param_groups[0]["params"], again.param_groups[0]["params"]
    for optimizer, own in zip((back, again), ends, strict=True):
        train(optimizer, own, 1, first=8)
    assert distance(*ends) < 1e-3
    codes = [optimizer.state[own[0]]["exp_avg"] for optimizer, own in ((ours, others),)]
    assert codes[0].dtype == torch.uint8


def test_an_eight_bit_checkpoint_loads_into_full_precision():
    params = make_params()
    quantised = co.AdamW(params, compile=False, **EIGHT_BIT)
    train(quantised, params, 3)
    plain = co.AdamW(params, compile=False)
    plain.load_state_dict(quantised.state_dict())
    train(plain, params, 1, first=3)
    state = plain.state[params[0]]
    assert state["exp_avg"].dtype == torch.float32
    assert "exp_avg" + SCALE not in state


def test_groups_have_their_own_storage():
    first, second, *_ = make_params()
    optimizer = co.AdamW([{"params": [first], **EIGHT_BIT}, {"params": [second]}], compile=False)
    train(optimizer, [first, second], 1)
    assert optimizer.state[first]["exp_avg"].dtype == torch.uint8
    assert optimizer.state[second]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("options", [{"max_grad_norm": 0.5}, {"maximize": True}, {"ema_decay": 0.5}], ids=str)
def test_storage_works_with_other_options(options):
    pairs = [make_params() for _ in range(2)]
    plain, quantised = co.AdamW(pairs[0], **options), co.AdamW(pairs[1], **options, **EIGHT_BIT)
    for optimizer, params in zip((plain, quantised), pairs, strict=True):
        train(optimizer, params, 5)
    moved = distance(make_params(), pairs[0])
    assert distance(*pairs) < 0.05 * moved


def test_a_moved_parameter_takes_its_quantised_states_along():
    params = make_params(shapes=((8, 16, 8, 8), (64, 80)))
    optimizer = co.AdamW(params, compile=False, **EIGHT_BIT)
    train(optimizer, params, 2)
    before = optimizer.full_state_dict()["state"]
    params[0].data = params[0].data.to(memory_format=torch.channels_last)  # another order in memory
    params[1].data = params[1].data.clone()
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.param_groups[0].update(lr=0.0, betas=(1.0 - 1e-12, 1.0 - 1e-12))
    optimizer.step()
    after = optimizer.full_state_dict()["state"]
    for index, name in itertools.product((0, 1), ("exp_avg", "exp_avg_sq")):
        difference = (after[index][name] - before[index][name]).abs()
        assert (difference <= 0.13 * before[index][name].abs() + 2e-4 * before[index][name].abs().max()).all()


COMPILED = ("SGD", "Lamb", "AdamP")
"""Rules that differ in their passes: elementwise, with sums over tensors, and with sums over rows."""


@pytest.mark.parametrize("name", [*COMPILED, "Lion", "RMSprop", "Adan", "Rprop", "NAdam"])
def test_other_rules_in_eight_bit(name):
    make = getattr(co, name)
    options = {"lr": 1e-3, "compile": name in COMPILED} | ({"momentum": 0.9} if name in ("SGD", "RMSprop") else {})
    pairs = [make_params(shapes=(*SHAPES, (4100,))) for _ in range(2)]
    plain, quantised = make(pairs[0], **options), make(pairs[1], **options, **EIGHT_BIT)
    for optimizer, params in zip((plain, quantised), pairs, strict=True):
        train(optimizer, params, 6)
    assert any(value.dtype == torch.uint8 for value in quantised.state[pairs[1][0]].values())
    moved = distance(make_params(shapes=(*SHAPES, (4100,))), pairs[0])
    assert distance(*pairs) < 0.25 * moved


def test_sgd_counts_steps_if_it_rounds_stochastically():
    params = make_params(torch.bfloat16)
    plain = co.SGD(params, lr=0.1, momentum=0.9, compile=False)
    train(plain, params, 2)
    rounding = co.SGD(params, lr=0.1, momentum=0.9, rounding="stochastic", compile=False)
    rounding.load_state_dict(plain.state_dict())  # without a step
    train(rounding, params, 2, first=2)
    assert rounding.state[params[0]]["step"] == 3  # what was loaded counts as one
    assert "step" not in plain.state[params[0]]


INVALID = {
    "unknown dtype": ({"state_dtype": torch.int32}, ValueError, 'use torch.float32, torch.bfloat16, .*"8bit"'),
    "unknown word": ({"state_dtype": "4bit"}, ValueError, "Invalid state_dtype value: '4bit'"),
    "unknown state": ({"state_dtype": {"momentum": "8bit"}}, ValueError, r"AdamW keeps \['exp_avg', 'exp_avg_sq'\]"),
    "float16 squares": ({"state_dtype": {"exp_avg_sq": torch.float16}}, ValueError, "use torch.bfloat16"),
    "average in 8 bits": (
        {"state_dtype": {"ema": "8bit"}, "ema_decay": 0.9},
        ValueError,
        "use torch.float32, torch.bfloat16, torch.float16, or leave it out",
    ),
    "unknown rounding": ({"rounding": "up"}, ValueError, "'nearest', 'stochastic', 'kahan'"),
    "two ways": ({"rounding": "kahan", "master_weights": True}, ValueError, "pass one of both"),
    "seed": ({"rounding": "stochastic", "rounding_seed": 0.5}, TypeError, "takes an int"),
}


@pytest.mark.parametrize(("options", "error", "message"), INVALID.values(), ids=INVALID)
def test_invalid_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        co.AdamW(make_params(), **options)


def test_complex_parameters_are_refused():
    with pytest.raises(ValueError, match="keeps complex parameters"):
        co.AdamW([torch.nn.Parameter(torch.zeros(5000, dtype=torch.complex64))], **EIGHT_BIT)


def test_states_rounded_to_nearest_are_warned_about():
    with pytest.warns(UserWarning, match="decay above 0.996"):
        co.AdamW(make_params(), state_dtype=torch.bfloat16, rounding="nearest")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        co.AdamW(make_params(), **BF16_STATES)


@pytest.mark.parametrize("shape", [(64, 64), (8192,)], ids=str)
def test_second_moments_of_adafactor_have_no_sign(shape):
    param = torch.nn.Parameter(torch.ones(shape))
    for name in ("row_var", "col_var", "variance"):
        with pytest.raises(ValueError, match=f"'{name}' cannot be kept in float16"):
            co.Adafactor([param], state_dtype={name: torch.float16})
    updates = []
    for kept in (None, torch.float16, "8bit"):
        param = torch.nn.Parameter(torch.ones(shape))
        optimizer = co.Adafactor([param], lr=1e-2, compile=False, **({"state_dtype": kept} if kept else {}))
        param.grad = 1e-5 * torch.logspace(0, -3, param.numel()).view(shape)
        optimizer.step()
        updates.append(param.detach() - 1)
        assert all(value.dtype != torch.float16 for value in optimizer.state[param].values())
    assert all((each - updates[0]).norm() < 0.05 * updates[0].norm() for each in updates)


PEAK = """
import torch
import compiled_optim as co

def status(key):
    (line,) = (line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

param = torch.nn.Parameter(torch.ones({elements}, dtype=torch.{dtype}))
param.grad = torch.ones_like(param)
optimizer = co.AdamW([param], **{options!r})
for _ in range(2):
    optimizer.step()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # resets the peak
before = status("VmRSS")
optimizer.step()
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory of a process from /proc")
@pytest.mark.parametrize(
    ("dtype", "options"),
    [("float32", EIGHT_BIT), ("bfloat16", {"rounding": "stochastic"}), ("bfloat16", {"rounding": "kahan"})],
    ids=str,
)
def test_a_step_makes_no_temporary_of_the_size_of_a_parameter(dtype, options):
    elements = 1 << 23
    script = PEAK.format(elements=elements, dtype=dtype, options=options)
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) < elements // 4, "a quarter of a byte for each element"
