"""Lower a traced graph with Inductor.

``torch.compile`` would add Dynamo's frame evaluation, its guards and AOTAutograd's wrappers to every call. They are not
needed here: a graph assumes exactly its :class:`Signature`, and a unit is only called with inputs of its signature.

Limit: this relies on Inductor's ``CompiledFxGraph`` and ``AsyncCompile``, which are private. Therefore each unit is run
once and compared with the eager program, and is not used if the results differ.
"""

from __future__ import annotations

import ast
import inspect
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Run = Callable[[list[Any]], Sequence[Tensor]]
Lowered = tuple[Run, int]
"""The function that runs a compiled graph, and the number of its kernels."""

NO_ASSERTS: dict[str, Any] = {
    # the engine guarantees that a parameter, its gradient and its states have equal sizes
    "size_asserts": False,
    "alignment_asserts": False,
    "do_not_emit_runtime_assertions": True,
}


TABLE_OPTIONS: dict[str, Any] = {
    # let a later loop compute values again instead of storing a temporary
    **dict.fromkeys(("realize_reads_threshold", "realize_acc_reads_threshold", "realize_opcount_threshold"), 1000),
}


def lower(module: torch.fx.GraphModule, examples: list[Any], options: Mapping[str, Any]) -> Lowered:
    """Compile a traced graph with Inductor; the options apply to this compilation only."""
    from compiled_optim.torch_private import compile_fx, metrics

    kernels = metrics.generated_kernel_count
    compiled: Any = compile_fx(module, examples, config_patches=dict(options))
    return _innermost(compiled), metrics.generated_kernel_count - kernels


class LazyKernel(ABC):
    """A kernel that Inductor generated. It is built when it is called for the first time."""

    def __init__(self, source: str, types: Sequence[str]) -> None:
        self.source = source
        self.types = types
        self._built: Any = None

    @abstractmethod
    def build(self) -> Any:
        """Build the kernel as Inductor does."""

    def built(self) -> Any:
        """Return the kernel; build it on first use."""
        if self._built is None:
            self._built = self.build()
        return self._built


class LazyCppKernel(LazyKernel):
    """A C++ kernel."""

    def __call__(self, *args: Any) -> None:
        self.built()(*args)

    def build(self) -> Any:
        """Build a library with the C++ compiler."""
        from compiled_optim.torch_private import CppPythonBindingsCodeCache

        return CppPythonBindingsCodeCache.load_pybinding(self.types, self.source)


class LazyTritonKernel(LazyKernel):
    """A Triton kernel. ``types`` are those of its parameters in ``signature``, without the sizes of blocks."""

    def __init__(self, name: str, source: str, device: str) -> None:
        found = re.search(r"triton_meta=\{'signature': (\{.*?\})", source)
        signature: dict[str, str] = ast.literal_eval(found[1]) if found else {}
        super().__init__(source, [kind for key, kind in signature.items() if not key.endswith("BLOCK")])
        self._name, self._device = name, device

    def run(self, *args: Any, **options: Any) -> None:
        """Launch the kernel."""
        self.built().run(*args, **options)

    def build(self) -> Any:
        """Compile with Triton, in this process or by Inductor's compile workers."""
        from compiled_optim.torch_private import AsyncCompile

        made = AsyncCompile().triton(self._name, self.source, self._device)
        return made.result() if hasattr(made, "result") else made


_lazy_threads: set[int] = set()
_lazy_lock = threading.Lock()
LAZY: dict[str, Callable[..., LazyKernel]] = {
    "cpp_pybinding": lambda types, source, *args, **kwargs: LazyCppKernel(source, types),
    "triton": lambda name, source, device_str="cuda": LazyTritonKernel(name, source, device_str),
}
"""The methods of Inductor's ``AsyncCompile`` that build kernels, and what replaces them."""


@contextmanager
def lazy_kernels() -> Iterator[None]:
    """Let modules that this thread compiles have a :class:`LazyKernel` for each kernel.

    A table unit contains the source of its kernels, so building each kernel separately would be wasted time. Other
    threads are not affected: the replaced methods call the original ones for them.
    """
    from compiled_optim.torch_private import AsyncCompile

    thread = threading.get_ident()
    with _lazy_lock:
        if not _lazy_threads:
            for name, lazy in LAZY.items():
                setattr(AsyncCompile, name, _lazy_method(getattr(AsyncCompile, name), lazy))
        _lazy_threads.add(thread)
    try:
        yield
    finally:
        with _lazy_lock:
            _lazy_threads.discard(thread)
            if not _lazy_threads:
                for name in LAZY:
                    setattr(AsyncCompile, name, getattr(AsyncCompile, name).original)


def _lazy_method(original: Callable[..., Any], lazy: Callable[..., LazyKernel]) -> Callable[..., Any]:
    """Return a method that makes lazy kernels in the threads that asked for them."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() in _lazy_threads:
            return lazy(*args, **kwargs)
        return original(self, *args, **kwargs)

    method.original = original  # type: ignore[attr-defined]
    return method


def generated_function(run: Run) -> Run:
    """Return the function that Inductor generated, without the wrapper that copies misaligned inputs."""
    while inspect.isfunction(run) and callable(inner := inspect.getclosurevars(run).nonlocals.get("model")):
        run = inner
    return run


def _innermost(compiled: Callable[..., Any]) -> Run:
    """Return the callable of Inductor's ``CompiledFxGraph`` inside its wrappers; without one, the outermost wrapper."""
    from compiled_optim.torch_private import CompiledFxGraph

    layers: list[Any] = [compiled]
    seen = {id(compiled)}
    for layer in layers:
        if isinstance(layer, CompiledFxGraph) and layer.current_callable is not None:
            run: Run = layer.current_callable
            return run
        cells = inspect.getclosurevars(layer).nonlocals if inspect.isfunction(layer) else {}
        for inner in [*cells.values(), *getattr(layer, "__dict__", {}).values()]:
            if callable(inner) and not isinstance(inner, type) and id(inner) not in seen:
                seen.add(id(inner))
                layers.append(inner)
    return lambda arguments: compiled(*arguments)
