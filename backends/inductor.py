"""Lower a traced graph with Inductor.

``torch.compile`` would add Dynamo's frame evaluation, its guards and AOTAutograd's wrappers to every call. They are not
needed here: a graph assumes exactly its :class:`Signature`, and a unit is only called with inputs of its signature.

Limit: this relies on Inductor's ``CompiledFxGraph`` and ``AsyncCompile``, which are private. Therefore each unit is run
once and compared with the eager program, and is not used if the results differ.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Run = Callable[[list[Any]], Sequence[Tensor]]
Lowered = tuple[Run, int]
"""The function that runs a compiled graph, and the number of its kernels."""

CPU_OPTIONS: dict[str, Any] = {
    # the engine guarantees that a parameter, its gradient and its states have equal sizes
    "size_asserts": False,
    "alignment_asserts": False,
    "do_not_emit_runtime_assertions": True,
}


def lower(module: torch.fx.GraphModule, examples: list[Any], options: Mapping[str, Any]) -> Lowered:
    """Compile a traced graph with Inductor; the options apply to this compilation only."""
    from compiled_optim.torch_private import compile_fx, metrics

    kernels = metrics.generated_kernel_count
    compiled: Any = compile_fx(module, examples, config_patches=dict(options))
    return _innermost(compiled), metrics.generated_kernel_count - kernels


class LazyKernel:
    """A C++ kernel that Inductor generated. It is built when it is called for the first time."""

    def __init__(self, types: Sequence[str], source: str) -> None:
        self.types = types
        self.source = source
        self._built: Callable[..., None] | None = None

    def __call__(self, *args: Any) -> None:
        if self._built is None:
            from compiled_optim.torch_private import CppPythonBindingsCodeCache

            self._built = CppPythonBindingsCodeCache.load_pybinding(self.types, self.source)
        self._built(*args)


_lazy_threads: set[int] = set()
_lazy_lock = threading.Lock()


@contextmanager
def lazy_kernels() -> Iterator[None]:
    """Let modules that this thread compiles have a :class:`LazyKernel` for each C++ kernel.

    A table unit contains the source of its kernels, so building each kernel separately would be wasted time. Other
    threads are not affected: the replaced method calls the original one for them.
    """
    from compiled_optim.torch_private import AsyncCompile

    thread = threading.get_ident()
    with _lazy_lock:
        if not _lazy_threads:
            original = AsyncCompile.cpp_pybinding

            def cpp_pybinding(self: Any, types: list[str], source: str, *args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() in _lazy_threads:
                    return LazyKernel(types, source)
                return original(self, types, source, *args, **kwargs)

            cpp_pybinding.original = original  # type: ignore[attr-defined]
            AsyncCompile.cpp_pybinding = cpp_pybinding
        _lazy_threads.add(thread)
    try:
        yield
    finally:
        with _lazy_lock:
            _lazy_threads.discard(thread)
            if not _lazy_threads:
                AsyncCompile.cpp_pybinding = AsyncCompile.cpp_pybinding.original


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
