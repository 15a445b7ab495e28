"""Calling a graph's only kernel without the Python wrapper that Inductor generates around it.

The wrapper unpacks its arguments, checks that sizes are not negative, drops each reference and passes most of the
arguments on twice: about as much work as the kernel itself does on four small tensors. Where it does nothing but pass
inputs to one kernel, this can be seen by letting it run once, and from then on the kernel is called with the same
inputs in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from compiled_optim.backends.graph import Place

KERNEL_PREFIX = "cpp_fused"


def only_kernel(
    run: Callable[[list[Any]], Sequence[Any]], arguments: Sequence[Any], places: Sequence[Place]
) -> tuple[Callable[..., Any], list[Place]] | None:
    """The kernel that ``run`` calls and the place of each of its arguments, or None if it does more than that.

    Runs it once. All numbers among the arguments must be different, so that one is not taken for another.
    """
    namespace: dict[str, Any] = getattr(run, "__globals__", {}) or getattr(run, "__func__", run).__globals__
    kernels = [name for name in namespace if name.startswith(KERNEL_PREFIX)]
    if len(kernels) != 1:
        return None
    (name,) = kernels
    kernel = namespace[name]
    seen: list[tuple[Any, ...]] = []

    def recorder(*given: Any) -> None:
        seen.append(given)
        kernel(*given)

    namespace[name] = recorder
    try:
        outputs = run(list(arguments))
    finally:
        namespace[name] = kernel
    origins = {_key(argument): place for argument, place in zip(arguments, places, strict=True)}
    if outputs or len(seen) != 1 or any(_key(given) not in origins for given in seen[0]):
        return None
    return kernel, [origins[_key(given)] for given in seen[0]]


def _key(argument: Any) -> object:
    return argument if isinstance(argument, int) else ("object", id(argument))
