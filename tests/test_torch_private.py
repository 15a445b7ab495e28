"""Private names of torch: one module uses them, and a name that is missing or wrong is replaced or reported."""

from __future__ import annotations

import ast
import ctypes
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import compiled_optim as co
from compiled_optim import torch_private
from compiled_optim.guard.check import metadata_check, plain_metadata_check
from tests.helpers import assert_close, copies, gradients, parameters, run_python

ROOT = Path(__file__).parents[1]
PUBLIC = re.compile(r"_foreach_\w+|_check|__\w+__")
"""Names that start with an underscore, but belong to the formula language or are documented."""


def is_private(name: str) -> bool:
    if not re.fullmatch(r"torch(\.\w+)+", name):
        return False
    private = any(part.startswith("_") and not PUBLIC.fullmatch(part) for part in name.split("."))
    return private or name.startswith("torch.fx.experimental")


def private_names(tree: ast.AST) -> set[str]:
    """Return the private names of torch in a module: imported, as attributes, and in strings."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return set(filter(is_private, found))


def test_private_names_are_found():
    code = """
import torch._dynamo
from torch.optim.optimizer import ParamsT, _global_optimizer_pre_hooks
from torch.fx.experimental.proxy_tensor import make_fx
torch._C._set_grad_enabled(False)
torch._foreach_add_(a, b)
"torch._inductor.config" in sys.modules
"""
    assert private_names(ast.parse(code)) == {
        *("torch._dynamo", "torch.optim.optimizer._global_optimizer_pre_hooks"),
        "torch.fx.experimental.proxy_tensor.make_fx",
        *("torch._C", "torch._C._set_grad_enabled", "torch._inductor.config"),
    }


def test_no_other_module_uses_private_names():
    modules = [path for folder in ("compiled_optim", "backends") for path in (ROOT / folder).rglob("*.py")]
    used = {path.relative_to(ROOT): private_names(ast.parse(path.read_text())) for path in modules}
    assert used.pop(Path("compiled_optim/torch_private.py"))
    assert len(used) > 50
    assert {path: names for path, names in used.items() if names} == {}


@pytest.mark.parametrize("version", ["1.13.1", "2.9.0", "2.11.0+cpu", "2.11.1.dev20260601"])
def test_a_torch_that_is_too_old_is_one_sentence(version):
    code = f"""
import torch
torch.__version__ = {version!r}
try:
    import compiled_optim
except ImportError as error:
    print(error)
"""
    (sentence,) = run_python(code).splitlines()
    assert sentence.startswith(f"compiled_optim needs torch 2.12 or later, but torch {version} is installed; upgrade")
    assert "pip install 'torch>=2.12'" in sentence


@pytest.mark.parametrize("version", ["2.12.0a0+git12ab34", "2.13.0+cpu", "2.15.1", "2.16.0.dev20270101", "3.0.0"])
def test_a_newer_torch_is_accepted_in_silence(version, recwarn):
    torch_private._check_version(version)
    assert not recwarn


def test_an_installed_torch_is_kept_unless_the_extra_is_asked_for():
    """A lower bound among the dependencies would make pip replace an older torch without a question."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "torch" in project["dependencies"]
    assert project["optional-dependencies"]["torch"] == [f"torch>={torch_private.OLDEST}"]


# ---- TensorGuards


def plain_guards(ignored: str = "", result: bool | None = None) -> type:
    """Return a class like TensorGuards in Python, which ignores a property of tensors or always returns ``result``."""

    def described(tensor):
        if tensor is None:
            return None
        properties = {
            "type": type(tensor),
            "dtype": tensor.dtype,
            "device": tensor.device,
            "layout": tensor.layout,
            "shape": tensor.shape,
            "strides": tensor.stride() if tensor.layout == torch.strided else None,
            "neg": tensor.is_neg(),
            "conj": tensor.is_conj(),
            "requires_grad": tensor.requires_grad,
        }
        return {name: value for name, value in properties.items() if name not in ignored.split()}

    class Guards:
        def __init__(self, *tensors, dynamic_dims_sizes, dynamic_dims_strides):
            self.tensors = tensors

        def check(self, *others):
            if result is not None:
                return result
            pairs = zip(self.tensors, others, strict=True)
            return all(described(a) == described(b) or (ignored == "None" and b is None) for a, b in pairs)

    return Guards


class OtherArguments:
    def __init__(self, *tensors, dynamic_dims):
        pass


GUARDS = {
    "right": plain_guards(),
    **{f"ignores {what}": plain_guards(what) for what in ("type", "dtype", "device", "strides", "neg", "conj")},
    "ignores shape": plain_guards("shape strides"),
    "ignores requires_grad": plain_guards("requires_grad type"),
    "ignores layout": plain_guards("layout strides"),
    "accepts None": plain_guards("None"),
    "accepts all": plain_guards(result=True),
    "accepts nothing": plain_guards(result=False),
    "takes other arguments": OtherArguments,
    "is gone": None,
}


@pytest.fixture
def replaced_guards(monkeypatch):
    """Return a function that replaces torch's TensorGuards until the end of the test."""

    def replace(guards):
        if guards is None:
            monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
        else:
            monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", guards)

    torch_private._tensor_guards.cache_clear()
    yield replace
    torch_private._tensor_guards.cache_clear()


@pytest.mark.parametrize("kind", GUARDS)
def test_wrong_tensor_guards_are_not_used(kind, replaced_guards):
    replaced_guards(GUARDS[kind])
    assert torch_private.tensor_guards() is (GUARDS["right"] if kind == "right" else None)
    base = torch.ones(2, 3)
    variants = [base.clone(), base.double(), base.view(3, 2), torch.ones(3, 2).t(), base.to("meta"), base.to_sparse()]
    variants += [torch.nn.Parameter(base), base.clone().requires_grad_(), torch._neg_view(base), None]
    check, plain = metadata_check([base, base]), plain_metadata_check([base, base])
    assert [check([base, other]) for other in variants] == [plain([base, other]) for other in variants]


@pytest.mark.parametrize("kind", ["accepts all", "ignores strides", "is gone"])
def test_steps_are_right_with_wrong_tensor_guards(kind, replaced_guards, compiled):
    """Gradients with other strides than before: a guard that accepts them would update the wrong elements."""
    replaced_guards(GUARDS[kind])
    ours = parameters([(4, 6), (3,)])
    theirs = copies(ours)
    optimizer = co.AdamW(ours, lr=0.1, compile=compiled)
    reference = torch.optim.AdamW(theirs, lr=0.1)
    for step, grads in enumerate(gradients(ours, 4)):
        for param, twin, grad in zip(ours, theirs, grads, strict=True):
            param.grad = grad.t().contiguous().t() if step % 2 and grad.ndim > 1 else grad
            twin.grad = grad.clone()
        optimizer.step()
        reference.step()
    assert_close(ours, theirs, 2e-6)


def test_fake_tensors_do_not_spoil_the_check(replaced_guards):
    """The result of the check in a FakeTensorMode is not kept for steps on real tensors."""
    with torch_private.FakeTensorMode():
        assert torch_private.tensor_guards() is None
    assert torch_private.tensor_guards() is torch._C._dynamo.guards.TensorGuards


# ---- other names that have a fallback


@pytest.fixture
def fresh_data_ptr():
    torch_private.data_ptr_function.cache_clear()
    yield
    torch_private.data_ptr_function.cache_clear()


DATA_PTR = "_torchinductor_pyobject_tensor_data_ptr"
returns_null = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(lambda tensor: None)


@pytest.mark.parametrize(
    "address", [None, "text", ctypes.cast(returns_null, ctypes.c_void_p).value], ids=["gone", "text", "wrong"]
)
def test_a_step_without_the_function_that_returns_addresses(address, monkeypatch, fresh_data_ptr):
    guards = torch._C._dynamo.guards
    original = getattr(guards, DATA_PTR)
    assert torch_private.data_ptr_function() == original
    torch_private.data_ptr_function.cache_clear()
    if address is None:
        monkeypatch.delattr(guards, DATA_PTR)
    else:
        monkeypatch.setattr(guards, DATA_PTR, address)
    assert torch_private.data_ptr_function() not in (original, address)
    ours = parameters([(4, 6), (3,), (0,)])
    theirs = copies(ours)
    optimizer, reference = co.AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    for step, grads in enumerate(gradients(ours, 4)):
        for i, (param, twin, grad) in enumerate(zip(ours, theirs, grads, strict=True)):
            param.grad = None if i == step else grad
            twin.grad = None if i == step else grad.clone()
        optimizer.step()
        reference.step()
    assert_close(ours, theirs, 2e-6)


def test_names_that_a_step_uses_have_fallbacks():
    """Hooks and the profiler see every step, and gradients are switched off in it, without any of the names."""
    code = """
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook as register
grads, profiler = torch._C._set_grad_enabled, torch._C._autograd._profiler_enabled
hooks = register.__globals__.pop("_global_optimizer_pre_hooks")
torch._C._set_grad_enabled = lambda mode: None
torch._C._autograd._profiler_enabled = lambda: None
import compiled_optim as co
torch._C._set_grad_enabled, torch._C._autograd._profiler_enabled = grads, profiler
register.__globals__["_global_optimizer_pre_hooks"] = hooks
assert co.torch_private.set_grad_enabled is torch.set_grad_enabled

seen = []
class Traced(co.SGD):
    def derived(self, group, step):
        seen.append(torch.is_grad_enabled())
        return super().derived(group, step)

register(lambda *args: seen.append("hook"))
param = torch.nn.Parameter(torch.ones(2))
param.grad = torch.ones(2)
optimizer = Traced([param], lr=0.25, compile=False)
seen.clear()
with torch.profiler.profile() as profile:
    optimizer.step()
assert seen[0] == "hook" and set(seen[1:]) == {False}, seen
assert torch.is_grad_enabled()
assert "Optimizer.step#Traced.step" in [event.key for event in profile.key_averages()]
print(param.tolist())
"""
    assert run_python(code) == "[0.75, 0.75]\n"


@pytest.mark.parametrize(
    "function", [None, lambda old, new: True, lambda old, new: False], ids=["gone", "always", "never"]
)
def test_kinds_of_tensors_are_compared_without_torch(function, monkeypatch):
    if function is None:
        monkeypatch.delattr(torch, "_has_compatible_shallow_copy_type")
    else:
        monkeypatch.setattr(torch, "_has_compatible_shallow_copy_type", function)
    torch_private.shallow_copy_check.cache_clear()
    check = torch_private.shallow_copy_check()
    monkeypatch.undo()
    torch_private.shallow_copy_check.cache_clear()
    tensors = [torch.ones(2), torch.ones(3, dtype=torch.float64), torch.ones(2).to_sparse()]
    for a in tensors:
        assert [check(a, b) for b in tensors] == [torch._has_compatible_shallow_copy_type(a, b) for b in tensors]


def test_the_cache_directory_without_the_source_of_inductor(monkeypatch, tmp_path):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    torch_private.default_cache_directory.cache_clear()
    found = torch_private.default_cache_directory()
    torch_private.default_cache_directory.cache_clear()
    assert found == default_cache_dir()


def test_unknown_defaults_of_inductor_make_all_settings_count(monkeypatch):
    torch_private.metrics  # noqa: B018 # imports Inductor
    assert torch_private.changed_settings() == {}
    values = {"freezing": False}
    monkeypatch.setitem(sys.modules, "torch._inductor.config", SimpleNamespace(get_config_copy=lambda: values))
    assert torch_private.changed_settings() == values


# ---- the compiler


@pytest.mark.parametrize("name", torch_private.COMPILER)
def test_the_names_of_the_compiler_exist(name):
    assert getattr(torch_private, name) is not None


def test_other_names_do_not_exist():
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = torch_private.no_such_name


def fresh_rule():
    """Return an optimizer that is not on disk and not in this process."""

    class Fresh(co.Optimizer):
        def __init__(self, params, lr=0.5, **options):
            super().__init__(params, {"lr": lr}, **options)

        @staticmethod
        def update(p, g, *, lr):
            p -= lr * g

    return Fresh


CHANGES = {
    "module": {"compile_fx": torch_private._Name("torch._inductor.no_such_module")},
    "name": {"make_fx": torch_private._Name("torch._inductor.metrics")},
    "attribute": {"CppBuilder": torch_private._Name("torch._inductor.cpp_builder", ("no_such_method",))},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_missing_name_of_the_compiler_is_an_error_with_the_version(change, monkeypatch):
    monkeypatch.setattr(torch_private, "COMPILER", {**torch_private.COMPILER, **CHANGES[change]})
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = fresh_rule()([param])
    with pytest.raises(co.BackendUnavailableError) as caught:
        optimizer.step()
    message = str(caught.value)
    assert message.startswith(f"torch {torch.__version__} failed to compile the step (")
    assert "no_such" in message or "make_fx" in message
    assert "compiled_optim is tested with torch 2.12 to 2.15; pass compile=False" in message
    assert param.tolist() == [1, 1]
