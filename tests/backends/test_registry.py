"""Tests of the backend registry, and of the errors of unavailable backends, which are raised before any change."""

from __future__ import annotations

import pytest
import torch

import compiled_optim as co
from compiled_optim import backends
from compiled_optim.backends.decompositions import foreach_decompositions, missing_foreach_decompositions
from tests.helpers import run_python


def test_registry():
    assert backends.names() == ["cpu", "cuda", "eager", "npu", "npu-inductor"]
    for name in backends.names():
        assert backends.get(name).name == name
    assert backends.for_device("cpu") is backends.get("cpu")
    assert backends.for_device("npu") is backends.get("npu")
    with pytest.raises(ValueError, match="Unknown backend: 'tpu'; registered are cpu, cuda, eager, npu, npu-inductor"):
        backends.get("tpu")
    with pytest.raises(co.BackendUnavailableError, match=r"'meta'.*compile=False"):
        backends.for_device("meta")


def test_entry_points_bring_third_party_backends(monkeypatch):
    from compiled_optim.backends import registry

    class Vendor(type(backends.get("eager"))):
        name = "vendor"
        devices = ("cpu",)
        compiles = True

    class EntryPoint:
        def load(self):
            return Vendor

    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    monkeypatch.setattr(registry, "_entry_points_loaded", False)
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [EntryPoint()] if group == "compiled_optim.backends" else []
    )
    assert "vendor" in backends.names()
    assert backends.for_device("cpu").name == "vendor"
    optimizer = co.SGD([torch.nn.Parameter(torch.ones(2))])
    assert optimizer.explain().backends == ("vendor",)


def test_unknown_options_are_refused():
    params = [torch.nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match="Unknown backend: 'tpu'"):
        co.AdamW(params, backend="tpu")
    with pytest.raises(ValueError, match="Invalid on_realloc value: 'ignore'"):
        co.AdamW(params, on_realloc="ignore")
    with pytest.raises(ValueError, match="Invalid max_grad_norm value: -1"):
        co.AdamW(params, max_grad_norm=-1)
    with pytest.raises(TypeError, match="AdamW got an unexpected keyword argument 'compiled'"):
        co.AdamW(params, compiled=True)
    with pytest.raises(co.BackendUnavailableError, match="backend 'cuda' serves cuda, but a parameter is on 'cpu'"):
        co.AdamW(params, backend="cuda")


def test_a_device_nobody_compiles_for_is_refused_at_construction(monkeypatch):
    """A device of its own kind cannot be made here, so the backend of the CPU is taken away."""
    params = [torch.nn.Parameter(torch.ones(2))]
    on_meta = co.AdamW([torch.nn.Parameter(torch.ones(2, device="meta"))])
    monkeypatch.delitem(backends.registry._backends, "cpu")
    with pytest.raises(co.BackendUnavailableError, match="no backend compiles for device type 'cpu'"):
        co.AdamW(params)
    assert co.AdamW(params, compile=False).explain().mode == "eager"
    with pytest.raises(co.BackendUnavailableError, match="no backend compiles"):
        on_meta.add_param_group({"params": params})
    assert len(on_meta.param_groups) == 1, "the group that was refused is not kept"


NO_COMPILER = """
import torch, compiled_optim as co
params = [torch.nn.Parameter(torch.ones(2))]
try:
    co.AdamW(params)
except co.BackendUnavailableError as error:
    print(error)
params[0].grad = torch.ones(2)
co.AdamW(params, compile=False).step()
"""


@pytest.mark.parametrize("environment", [{"PATH": ""}, {"CXX": "no-such-compiler"}], ids=["PATH", "CXX"])
def test_without_a_compiler_construction_says_so(environment, tmp_path):
    message = run_python(NO_COMPILER, **environment, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert "no C++ compiler was found" in message
    assert "compile=False" in message
    assert "CXX" in message


FROM_DISK = """
import torch, compiled_optim as co
params = [torch.nn.Parameter(torch.ones(2))]
params[0].grad = torch.ones(2)
co.AdamW(params, lr=0.25, weight_decay=0).step()
print(params[0].tolist())
try:
    co.Lion(params).step()
except co.BackendUnavailableError as error:
    print(error)
"""


def test_without_a_compiler_units_on_disk_are_used(tmp_path):
    """An image can be built with a compiler and run without one."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    assert run_python(FROM_DISK.replace("co.Lion", "co.AdamW"), **cache).strip() == "[0.75, 0.75]"
    values, message = run_python(FROM_DISK, **cache, CXX="no-such-compiler").split("\n", 1)
    assert values == "[0.75, 0.75]"
    assert "the C++ compiler does not work" in message
    assert "compile=False" in message


def test_a_compiler_that_fails_is_reported_in_few_words(tmp_path):
    """Construction succeeds because the compiler exists. warmup() fails."""
    compiler = tmp_path / "broken-c++"
    compiler.write_text("#!/bin/sh\necho broken on purpose >&2\nexit 1\n")
    compiler.chmod(0o755)
    code = NO_COMPILER.replace("co.AdamW(params)\n", "co.AdamW(params).warmup()\n", 1)
    message = run_python(code, CXX=str(compiler), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    assert "compile=False" in message


@pytest.mark.parametrize("variable", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_switches_of_dynamo_do_not_make_a_step_eager(variable, tmp_path):
    """Rules are traced without Dynamo."""
    code = """
import torch, compiled_optim as co
weight = torch.nn.Parameter(torch.ones(2))
weight.grad = torch.ones(2)
opt = co.SGD([weight], lr=0.5)
opt.step()
print(weight.tolist(), opt.explain().mode, opt.explain().graphs)
"""
    printed = run_python(code, **{variable: "1"}, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert printed.strip() == "[0.5, 0.5] compiled 1"


@pytest.mark.parametrize(("value", "mode"), [("1", "eager"), ("0", "compiled"), ("", "compiled")])
def test_eager_by_environment(value, mode):
    code = """
import torch, compiled_optim as co
print(co.AdamW([torch.nn.Parameter(torch.ones(2))]).explain().mode)
"""
    assert run_python(code, COMPILED_OPTIM_EAGER=value).strip() == mode


ONE_LIST = ("abs", "exp", "log", "neg", "reciprocal", "rsqrt", "sigmoid", "sign", "sqrt", "tanh")
TWO_LISTS = ("add", "clamp_max", "clamp_min", "div", "maximum", "minimum", "mul", "pow", "sub")


@pytest.mark.parametrize("name", [*ONE_LIST, *TWO_LISTS])
def test_list_operations_taken_apart_compute_the_same(name):
    """The decompositions are for compilers without list operations; the in-place ones are for tracing."""
    decompositions = missing_foreach_decompositions(lambda operation: False)
    tensors = [torch.tensor([0.5, 2.0, 3.0]), torch.tensor([4.0])]
    others = {"List": [tensors[::-1]], "Scalar": [1.5], "ScalarList": [[1.5, 2.5]], "Tensor": [torch.tensor(1.5)]}
    packet = getattr(torch.ops.aten, f"_foreach_{name}")
    overloads = {"default": []} if name in ONE_LIST else others
    tried = [overload for overload in overloads if overload in packet.overloads()]
    assert tried
    for overload in tried:
        operation = getattr(packet, overload)
        for a, b in zip(
            decompositions[operation](tensors, *overloads[overload]),
            operation(tensors, *overloads[overload]),
            strict=True,
        ):
            assert torch.equal(a, b), overload
        in_place = getattr(getattr(torch.ops.aten, f"_foreach_{name}_"), overload)
        expected, found = ([tensor.clone() for tensor in tensors] for _ in range(2))
        operands = [tensors] if overload == "List" else overloads[overload]  # in-place operations do not broadcast
        in_place(expected, *operands)
        foreach_decompositions()[in_place](found, *operands)
        assert all(map(torch.equal, found, expected)), overload
