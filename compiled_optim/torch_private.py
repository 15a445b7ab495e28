"""The private names of torch that this package uses. No other module of the package uses one.

A private name may change with any release of torch. Therefore each is checked before it is used for the first time. If
it is missing or does not work as expected, plain Python replaces it where that is possible. Otherwise the error names
the version of torch.

The names in ``COMPILER`` belong to Inductor and to the tracer. They are imported when they are used for the first time,
because a process that loads its units from disk imports neither Inductor nor Dynamo. Their results are checked as well:
every unit is compared with the eager program before it is used (``backends.verification``).
"""

from __future__ import annotations

import ctypes
import getpass
import importlib
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from compiled_optim.errors import BackendUnavailableError, first_line

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass

T = TypeVar("T")

OLDEST, NEWEST = "2.12", "2.15"
"""The oldest release of torch that works, and the newest one that was tested."""

TESTED = f"compiled_optim is tested with torch {OLDEST} to {NEWEST}"


def _check_version(found: str) -> None:
    """Raise if torch is too old. A release that is newer than those tested is accepted; the checks below protect it."""
    release = tuple(map(int, found.split(".")[:2]))
    if release < tuple(map(int, OLDEST.split("."))):
        raise ImportError(
            f"compiled_optim needs torch {OLDEST} or later, but torch {found} is installed; upgrade it with "
            f"`pip install 'torch>={OLDEST}'` (and torch_npu, if it is installed, to the release for that torch)"
        )


_check_version(torch.__version__)

try:
    from torch._ops import OpOverload as OpOverload
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

    disable_current_modes, current_modes = _disable_current_modes, _get_current_dispatch_mode_stack
    disable_dynamo = torch._compile._disable_dynamo
    profile_hook_step = torch.optim.Optimizer.profile_hook_step
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"compiled_optim does not work with torch {torch.__version__} ({first_line(error)}); {TESTED}: install one of "
        f"these, or a newer compiled_optim"
    ) from error


def _checked(find: Callable[[], Any], works: Callable[[Any], bool], fallback: T) -> T:
    """Return a private object of torch if it exists and works, else the fallback."""
    try:
        found: T = find()
        return found if works(found) else fallback
    except Exception:  # a changed function may raise anything
        return fallback


# ---- the step


def _switches_grad_mode(function: Callable[[bool], Any]) -> bool:
    before = torch.is_grad_enabled()
    try:
        function(not before)
        return torch.is_grad_enabled() is not before
    finally:
        torch.set_grad_enabled(before)


def _global_hooks(register: Any, name: str) -> Mapping[int, Any]:
    """Return the dict to which a function of torch adds hooks; if it is not found, a dict that is never empty."""
    return _checked(
        lambda: register.__globals__[name],
        lambda hooks: isinstance(hooks, dict) and name in register.__code__.co_names,
        {0: None},
    )


set_grad_enabled: Callable[[bool], Any] = _checked(
    lambda: torch._C._set_grad_enabled, _switches_grad_mode, torch.set_grad_enabled
)
"""What ``torch.no_grad()`` calls, without its 3 µs."""

profiler_enabled: Callable[[], bool] = _checked(
    lambda: torch._C._autograd._profiler_enabled, lambda enabled: isinstance(enabled(), bool), lambda: True
)

global_pre_hooks = _global_hooks(register_optimizer_step_pre_hook, "_global_optimizer_pre_hooks")
global_post_hooks = _global_hooks(register_optimizer_step_post_hook, "_global_optimizer_post_hooks")


def _counts_modes(count: Callable[[], int]) -> bool:
    before = count()
    with TorchDispatchMode():  # type: ignore[no-untyped-call]
        return before == len(current_modes()) - 1 and count() == before + 1


count_modes: Callable[[], int] = _checked(
    lambda: torch._C._len_torch_dispatch_stack, _counts_modes, lambda: len(current_modes())
)
"""The number of active dispatch modes, those of FakeTensorMode and of tracers included."""


def is_tracing_mode(mode: object) -> bool:
    """Return True for a FakeTensorMode, and for the modes of ``make_fx`` and functionalization."""
    return getattr(mode, "_mode_key", None) is not None


def fake_tensor_types() -> tuple[type, ...]:
    """Return the types FakeTensor and FakeTensorMode, or nothing if they are not imported, so that none exists."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return () if module is None else (module.FakeTensor, module.FakeTensorMode)


def at_end_of_backward(callback: Callable[[], None]) -> bool:
    """Let autograd call a function at the end of the current backward, unless it fails; return False if it cannot."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except AttributeError:
        return False
    return True


def restore_hooks(param: Tensor) -> None:
    """Let autograd call the post-accumulate hooks of a parameter that torch.utils.swap_tensors has exchanged.

    They are still registered with the parameter, but autograd looks for them in what was exchanged. Without this name,
    they are not called.
    """
    hooks = getattr(param, "_post_accumulate_grad_hooks", None)
    if hooks:
        param._post_accumulate_grad_hooks = hooks


# ---- tensors


def tensor_guards() -> Any:
    """Return Dynamo's class ``TensorGuards``, which compares the metadata of tensors, or None if it does not work.

    It does not work for fake tensors, so the result is None within a FakeTensorMode.
    """
    return _tensor_guards() if type(torch.empty(0, device="cpu")) is Tensor else None


@lru_cache
def _tensor_guards() -> Any:
    return _checked(lambda: torch._C._dynamo.guards.TensorGuards, _compares_metadata, None)


def _compares_metadata(guards: Any) -> bool:
    """Return True if a guard accepts tensors like its own, and no others."""
    known, spread = torch.zeros(2, 3, device="cpu"), torch.zeros(2, 3, dtype=torch.complex64, device="cpu")
    others = (
        torch.zeros(2, 3, dtype=torch.float64, device="cpu"),
        torch.zeros(3, 2, device="cpu"),
        torch.zeros(6, device="cpu"),
        torch.zeros(3, 2, device="cpu").t(),
        torch.zeros(1, device="cpu").expand(2, 3),
        torch.zeros(2, 3, device="meta"),
        torch.zeros(2, 3, device="cpu", requires_grad=True),
        torch.nn.Parameter(torch.zeros(2, 3, device="cpu"), requires_grad=False),
        torch.zeros(2, 3, device="cpu").to_sparse(),
        None,
    )

    def checker(*tensors: Tensor) -> Callable[..., bool]:
        check: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check

    check, check_bits = checker(known, known), checker(spread, spread.imag)
    accepts = check(known.clone(), torch.ones(2, 3, device="cpu")) and check_bits(spread, spread.imag)
    rejects = not any(check(known, other) or check(other, known) for other in others)
    lazily_conjugated = spread.conj()
    rejects_bits = not (check_bits(lazily_conjugated, spread.imag) or check_bits(spread, lazily_conjugated.imag))
    return bool(accepts) and rejects and rejects_bits


@lru_cache
def data_ptr_function() -> int:
    """Return the address of a C function that returns the address of a tensor: that of Inductor's generated code."""
    address = _checked(
        lambda: torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr,  # type: ignore[attr-defined]
        _reads_addresses,
        0,
    )
    return address or ctypes.cast(_PLAIN_DATA_PTR, ctypes.c_void_p).value or 0


_DATA_PTR_TYPE = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)
_PLAIN_DATA_PTR = _DATA_PTR_TYPE(Tensor.data_ptr)
"""The same function in Python. It is slower."""


def _reads_addresses(address: int) -> bool:
    tensor = torch.zeros(3, device="cpu")[1:]
    return bool(_DATA_PTR_TYPE(address)(tensor) == tensor.data_ptr())


@lru_cache
def shallow_copy_check() -> Callable[[Tensor, Tensor], bool]:
    """Return a function that tells whether ``old.data = new`` is possible between two kinds of tensors."""

    def works(function: Callable[[Tensor, Tensor], bool]) -> bool:
        dense = torch.zeros(1, device="cpu")
        return function(dense, dense.double()) and not function(dense, dense.to_sparse())

    def same_kind(old: Tensor, new: Tensor) -> bool:
        return (old.device.type, old.layout) == (new.device.type, new.layout)

    return _checked(lambda: torch._has_compatible_shallow_copy_type, works, same_kind)


# ---- the compiler


class _Name(NamedTuple):
    """A name in a private module, and the attributes of it that are used."""

    module: str
    attributes: tuple[str, ...] = ()


COMPILER = {
    "AsyncCompile": _Name("torch._inductor.async_compile", ("cpp_pybinding", "triton")),
    "BuildOptionsBase": _Name("torch._inductor.cpp_builder"),
    "CompiledFxGraph": _Name("torch._inductor.output_code"),
    "CppBuilder": _Name("torch._inductor.cpp_builder", ("build", "get_command_line", "get_target_file_path")),
    "CppPythonBindingsCodeCache": _Name("torch._inductor.codecache", ("load_pybinding",)),
    "CppTorchDeviceOptions": _Name("torch._inductor.cpp_builder"),
    "CustomGraphPass": _Name("torch._inductor.custom_graph_pass", ("uuid",)),
    "FakeTensorMode": _Name("torch._subclasses.fake_tensor"),
    "PyCodeCache": _Name("torch._inductor.codecache", ("modules_no_attr",)),
    "ShapeEnv": _Name(
        "torch.fx.experimental.symbolic_shapes", ("create_unbacked_symint", "ignore_fresh_unbacked_symbols")
    ),
    "code_hash": _Name("torch._inductor.codecache"),
    "compile_fx": _Name("torch._inductor.compile_fx"),
    "config": _Name("torch._inductor", ("cpp",)),
    "enable_python_dispatcher": _Name("torch._dispatch.python"),
    "exc": _Name("torch._inductor", ("CppCompileError", "InductorError", "InvalidCxxCompiler")),
    "get_hash_for_files": _Name("torch._inductor.custom_graph_pass"),
    "make_fx": _Name("torch.fx.experimental.proxy_tensor"),
    "metrics": _Name("torch._inductor", ("generated_kernel_count",)),
    "pick_vec_isa": _Name("torch._inductor.cpu_vec_isa"),
    "triton_helpers": _Name("torch._inductor.runtime"),
}


def __getattr__(name: str) -> Any:
    """Import a name of the compiler. ``from compiled_optim.torch_private import name`` calls this."""
    if name not in COMPILER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attributes = COMPILER[name]
    try:
        found = _import(module, name)
        for attribute in attributes:
            getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        raise BackendUnavailableError(unsupported(error)) from error
    return found


def _import(module: str, name: str) -> Any:
    """Return what ``from module import name`` imports."""
    owner = importlib.import_module(module)
    return getattr(owner, name) if hasattr(owner, name) else importlib.import_module(f"{module}.{name}")


def unsupported(error: BaseException) -> str:
    """Return the message for a failure of torch's compiler that may come from an untested version of torch."""
    return (
        f"torch {torch.__version__} failed to compile the step ({type(error).__name__}: {first_line(error)}); "
        f"{TESTED}; pass compile=False to run the same step eagerly"
    )


def is_compiler_imported() -> bool:
    """Return True if this process has imported Inductor, which takes some seconds."""
    return "torch._inductor.compile_fx" in sys.modules


def changed_settings() -> dict[str, Any]:
    """Return the settings of Inductor that code in this process has changed, or all if it is unknown which."""
    config = sys.modules.get("torch._inductor.config")
    if config is None:  # nothing can have changed it by code
        return {}
    values: dict[str, Any] = config.get_config_copy()
    try:
        entries = {name: config._config[name] for name in values}
        initial = {name: (e.default, e.env_value_force, e.env_value_default) for name, e in entries.items()}
    except (AttributeError, KeyError):
        return values
    return {name: value for name, value in values.items() if value not in initial[name]}


@lru_cache
def default_cache_directory() -> str:
    """Return the directory that Inductor uses if none is set, from its own source."""
    path = Path(torch.__file__).parent / "_inductor" / "runtime" / "cache_dir_utils.py"
    # executed on its own, because importing it by name imports all of Inductor and Dynamo
    names: dict[str, Any] = {"__name__": "cache_dir_utils"}
    try:
        exec(compile(path.read_text(), str(path), "exec"), names)
        return str(names["default_cache_dir"]())
    except Exception:  # a changed module may raise anything
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        return str(Path(tempfile.gettempdir()) / f"torchinductor_{user}")
