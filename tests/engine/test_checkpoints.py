"""Tests of checkpoints: to and from torch.optim, files, other devices and other dtypes."""

from __future__ import annotations

import copy
import io
import json
import pickle

import pytest
import torch

import compiled_optim as co
import compiled_optim.npu
from catalog import CATALOG
from tests.helpers import SMALL, assert_close, copies, gradients, parameters, run_python

VARIANTS = [
    ("SGD", {}),
    ("SGD", dict(momentum=0.9, dampening=0.2, weight_decay=0.01)),
    ("SGD", dict(momentum=0.9, nesterov=True)),
    ("Adam", dict(weight_decay=0.01)),
    ("Adam", dict(amsgrad=True)),
    ("AdamW", {}),
    ("AdamW", dict(amsgrad=True)),
    ("Adadelta", {}),
    ("RMSprop", {}),
    ("RMSprop", dict(momentum=0.9)),
    ("RMSprop", dict(centered=True)),
    ("RMSprop", dict(momentum=0.9, centered=True)),
    ("Adamax", {}),
    ("Adagrad", dict(initial_accumulator_value=0.1, lr_decay=0.1)),
    ("RAdam", {}),
    ("Rprop", {}),
    ("NAdam", {}),
    ("ASGD", dict(t0=5.0, lambd=0.1)),
]
IDS = ["-".join([name, *options]) for name, options in VARIANTS]


def through_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_bytes_and_json(saved):
    """Save as safetensors does: the bytes of each tensor under a name, everything else as JSON."""
    tensors, numbers = {}, {"param_groups": saved["param_groups"], "state": {}}
    for key, state in saved["state"].items():
        for name, value in state.items():
            assert type(value) is torch.Tensor, "nothing but plain tensors"
            assert value.is_contiguous()
            tensors[f"{key}.{name}"] = value.numpy().tobytes(), tuple(value.shape)
    places = [value.data_ptr() for state in saved["state"].values() for value in state.values() if value.numel()]
    assert len(set(places)) == len(places), "safetensors refuses tensors that share memory"
    loaded = json.loads(json.dumps(numbers, allow_nan=False))
    for name, (data, shape) in tensors.items():
        key, state = name.split(".")
        values = torch.frombuffer(bytearray(data), dtype=torch.float32) if data else torch.empty(0)
        loaded["state"].setdefault(key, {})[state] = values.reshape(shape)
    loaded["state"] = {int(key): state for key, state in loaded["state"].items()}
    return loaded


def advance(optimizer, params, first, last):
    """Take steps ``first`` to ``last`` of one sequence of gradients."""
    for grads in list(gradients(params, last))[first:]:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()


def make(kind, name, params, compiled, **options):
    if kind == "torch":
        return getattr(torch.optim, name)(params, **options)
    return getattr(co, name)(params, **options, compile=compiled)


@pytest.mark.parametrize("carrier", [through_file, through_bytes_and_json])
@pytest.mark.parametrize(("source", "target"), [("ours", "torch"), ("torch", "ours"), ("ours", "ours")])
@pytest.mark.parametrize("fresh", [True, False], ids=["into fresh", "into stepped"])
@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
def test_checkpoints_are_exchanged_with_torch_both_ways(name, options, source, target, fresh, carrier, compiled):
    """Ten steps with one optimizer and ten with the other equal twenty steps of torch.optim."""
    expected = parameters(SMALL)
    advance(make("torch", name, expected, None, lr=0.1, **options), expected, 0, 20)

    first = parameters(SMALL)
    optimizer = make(source, name, first, compiled, lr=0.1, **options)
    advance(optimizer, first, 0, 10)
    saved = carrier(optimizer.state_dict())

    second = copies(first)
    resumed = make(target, name, second, compiled, lr=0.3, **options)
    if not fresh:
        advance(resumed, second, 0, 2)
        with torch.no_grad():
            for param, value in zip(second, first, strict=True):
                param.copy_(value)
    resumed.load_state_dict(saved)
    advance(resumed, second, 10, 20)
    assert_close(second, expected, 2e-6)


@pytest.mark.parametrize("name", CATALOG)
def test_every_optimizer_resumes_bit_for_bit(name):
    whole, halves = parameters(SMALL), parameters(SMALL)
    advance(getattr(co, name)(whole, **CATALOG[name].typical), whole, 0, 6)
    optimizer = getattr(co, name)(halves, **CATALOG[name].typical)
    advance(optimizer, halves, 0, 3)
    saved = through_file(optimizer.state_dict())
    assert through_bytes_and_json(saved)["param_groups"]  # has only JSON types
    resumed = getattr(co, name)(halves, lr=7.0)
    resumed.load_state_dict(saved)
    advance(resumed, halves, 3, 6)
    assert_close(halves, whole, 0)
    assert resumed.explain().recompiles == 0


def test_integer_steps_of_torch_npu_load(compiled):
    """In checkpoints of torch_npu, steps are ints, and the groups do not have torch's newer keys."""
    expected = parameters(SMALL)
    reference = torch.optim.AdamW(expected, amsgrad=True)
    advance(reference, expected, 0, 3)
    checkpoint = copy.deepcopy(reference.state_dict())
    for state in checkpoint["state"].values():
        state["step"] = int(state["step"])
    for group in checkpoint["param_groups"]:
        for key in ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
            del group[key]
    params = copies(expected)
    optimizer = co.AdamW(params, compile=compiled)
    optimizer.load_state_dict(checkpoint)
    assert optimizer.state_dict()["state"][0]["step"] == 3
    advance(optimizer, params, 3, 6)
    advance(reference, expected, 3, 6)
    assert_close(params, expected, 2e-6)
    assert optimizer.state_dict()["state"][0]["step"] == 6


TORCH_NPU_KEYS = {
    "SGD": "lr momentum dampening weight_decay nesterov",
    "Adam": "lr betas eps weight_decay amsgrad",
    "AdamW": "lr betas eps weight_decay amsgrad",
    "AdamP": "lr betas eps weight_decay delta wd_ratio nesterov",
    "Lamb": "lr betas eps weight_decay",
    "BertAdam": "lr schedule warmup t_total b1 b2 e weight_decay max_grad_norm",
    "Adadelta": "lr rho eps weight_decay",
    "RMSprop": "lr momentum alpha eps centered weight_decay",
    "RMSpropTF": "lr momentum alpha eps centered weight_decay decoupled_decay lr_in_momentum",
}


@pytest.mark.parametrize("name", TORCH_NPU_KEYS)
def test_checkpoints_of_torch_npu_load(name):
    """The groups have torch_npu's keys and a scheduler's, and steps are ints."""
    whole, halves = parameters(SMALL), parameters(SMALL)
    advance(getattr(co, name)(whole, **CATALOG[name].typical, compile=False), whole, 0, 6)
    optimizer = getattr(co, name)(halves, **CATALOG[name].typical, compile=False)
    advance(optimizer, halves, 0, 3)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        if "step" in state:
            state["step"] = int(state["step"])
    keys = ["params", *TORCH_NPU_KEYS[name].split()]
    saved["param_groups"] = [{key: group[key] for key in keys} for group in saved["param_groups"]]
    saved["param_groups"][0]["initial_lr"] = 1.0
    resumed = getattr(co.npu, f"NpuFused{name}")(halves, lr=7.0, compile=False)
    resumed.load_state_dict(saved)
    advance(resumed, halves, 3, 6)
    assert_close(halves, whole, 0)


def test_a_checkpoint_loads_on_another_device():
    """Training moves from the CPU to a device of type npu and back, and equals torch.optim on the CPU."""
    run_python(
        """
import torch, compiled_optim as co
from tests import npu_device
from tests.helpers import assert_close, parameters
from tests.engine.test_checkpoints import advance
npu_device.install()
expected, here = parameters([(3, 2), (4,)]), parameters([(3, 2), (4,)])
advance(torch.optim.AdamW(expected, lr=0.1), expected, 0, 9)
optimizer = co.AdamW(here, lr=0.1, compile=False)
advance(optimizer, here, 0, 3)
for device in ("npu", "cpu"):
    params = [torch.nn.Parameter(param.detach().to(device)) for param in here]
    saved = optimizer.state_dict()
    optimizer = co.AdamW(params, lr=0.1, compile=False)
    optimizer.load_state_dict(saved)
    assert {v.device.type for s in optimizer.state.values() for k, v in s.items() if k != "step"} == {device}
    steps = int(optimizer.state_dict()["state"][0]["step"])
    advance(optimizer, params, steps, steps + 3)
    here = params
assert steps == 6
assert_close(here, expected, 2e-6)
"""
    )


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_float32_states_of_low_precision_parameters_stay(low, compiled):
    """The states load bitwise. Training then equals torch.optim with float32 copies of the parameters."""
    masters = parameters(SMALL, low)
    masters = [torch.nn.Parameter(param.detach().float()) for param in masters]
    reference = torch.optim.AdamW(masters, lr=0.1)
    advance(reference, masters, 0, 3)
    params = [torch.nn.Parameter(param.detach().to(low)) for param in masters]
    optimizer = co.AdamW(params, lr=0.1, compile=compiled)
    saved = copy.deepcopy(reference.state_dict())
    optimizer.load_state_dict(saved)
    for number, param in enumerate(params):
        for name in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[param][name].dtype == torch.float32
            assert torch.equal(optimizer.state[param][name], reference.state[masters[number]][name])
    for step in range(3, 6):
        with torch.no_grad():
            for master in masters:
                master.copy_(master.to(low))
        advance(optimizer, params, step, step + 1)
        advance(reference, masters, step, step + 1)
        assert_close(params, masters, 4e-3 if low == torch.bfloat16 else 5e-4)  # rounded once
    for param, master in zip(params, masters, strict=True):
        values = [[state[name] for name in ("exp_avg", "exp_avg_sq")] for state in (optimizer.state[param],)]
        theirs = [reference.state[master][name] for name in ("exp_avg", "exp_avg_sq")]
        assert_close(values[0], theirs, 2e-6)
    again = co.AdamW(params, compile=compiled)
    again.load_state_dict(through_file(optimizer.state_dict()))
    assert again.state[params[0]]["exp_avg"].dtype == torch.float32
    theirs = torch.optim.AdamW(copies(params))
    theirs.load_state_dict(optimizer.state_dict())
    assert theirs.state[theirs.param_groups[0]["params"][0]]["exp_avg"].dtype == low, "where torch differs"


@pytest.mark.parametrize(
    ("param", "state", "loaded"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float64, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float32, torch.float64, torch.float32),
        (torch.float64, torch.float32, torch.float64),
        (torch.complex64, torch.complex128, torch.complex64),
    ],
    ids=str,
)
def test_a_checkpoint_loads_in_another_dtype(param, state, loaded, compiled):
    """In all other cases a state is converted to the dtype of its parameter, as in torch."""
    old = [torch.nn.Parameter(torch.ones(4, dtype=state))]
    donor = torch.optim.AdamW(old, lr=0.1)
    wide = torch.complex128 if param.is_complex else torch.float64
    exact = [torch.nn.Parameter(torch.ones(4, dtype=wide))]
    (new,) = params = [torch.nn.Parameter(torch.ones(4, dtype=param))]
    reference, optimizer = torch.optim.AdamW(exact, lr=0.1), co.AdamW(params, compile=compiled)
    advance(donor, old, 0, 1)
    for other in (reference, optimizer):
        other.load_state_dict(copy.deepcopy(donor.state_dict()))
    assert {optimizer.state[new][name].dtype for name in ("exp_avg", "exp_avg_sq")} == {loaded}
    for opt, values in ((reference, exact), (optimizer, params)):
        advance(opt, values, 1, 3)
    assert_close(params, exact, 2e-2 if param == torch.bfloat16 else 2e-6)
    assert int(optimizer.state[new]["step"]) == 3


def test_what_users_keep_in_a_state_survives():
    (param,) = params = parameters([(3,)])
    optimizer = co.AdamW(params, compile=False)
    advance(optimizer, params, 0, 1)
    optimizer.state[param].update(note="kept", counts=torch.tensor([1, 2]), pair=[torch.ones(2), 3], nothing=None)
    optimizer.state["of no parameter"] = {"epoch": 7}
    other = co.AdamW(params, compile=False)
    other.load_state_dict(through_file(optimizer.state_dict()))
    state = other.state[param]
    assert state["note"] == "kept"
    assert state["counts"].tolist() == [1, 2]
    assert not state["counts"].is_floating_point()
    assert state["pair"][0].tolist() == [1, 1]
    assert other.state["of no parameter"] == {"epoch": 7}
    advance(other, params, 1, 2)
    assert other.state[param]["note"] == "kept"


@pytest.mark.parametrize("name", CATALOG)
def test_loading_adds_no_keys(name):
    params = parameters(SMALL)
    optimizer = getattr(co, name)(params, compile=False)
    advance(optimizer, params, 0, 2)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert optimizer.state_dict()["param_groups"] == saved["param_groups"]
    assert pickle.loads(pickle.dumps(optimizer)).state_dict()["param_groups"] == saved["param_groups"]


def test_options_of_this_package_that_a_group_has_are_kept():
    """A checkpoint of torch.optim does not have them."""
    params = parameters([(3,), (4,)])
    reference = torch.optim.AdamW(params, lr=0.5)
    for param in params:
        param.grad = torch.ones_like(param)
    reference.step()
    own = {"ema_decay": 0.9, "ema_warmup": True, "cautious": True, "master_weights": True}
    optimizer = co.AdamW([{"params": params[:1], **own}, {"params": params[1:]}], compile=False)
    saved = copy.deepcopy(reference.state_dict())
    first = saved["param_groups"][0]
    saved["param_groups"] = [{**first, "params": [0]}, {**first, "params": [1]}]
    optimizer.load_state_dict(saved)
    group, other = optimizer.param_groups
    assert {key: group[key] for key in own} == own
    assert group["lr"] == 0.5
    assert not own.keys() & other.keys()
    optimizer.step()
    assert optimizer.state[params[0]]["ema"] is not None


def test_options_that_torch_has_too_come_from_the_checkpoint():
    """An old checkpoint of torch.optim.Adam has no ``decoupled_weight_decay``, so it is False."""
    params = parameters([(3,)])
    saved = torch.optim.Adam(params).state_dict()
    del saved["param_groups"][0]["decoupled_weight_decay"]
    optimizer = co.Adam(params, decoupled_weight_decay=True, compile=False)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is False
