"""Call the only kernel of a graph without the Python wrapper that Inductor generates around it.

The wrapper unpacks its arguments, checks that sizes are not negative, deletes each reference and passes most arguments
twice. On four small tensors this takes about as long as the kernel itself. :func:`only_kernel` runs the wrapper once
and records the call of the kernel. If the wrapper only passes its inputs to one kernel, later steps call the kernel
directly, with the same inputs in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from compiled_optim.backends.graph import Place

KERNEL_PREFIX = "cpp_fused"


def only_kernel(
    run: Callable[[list[Any]], Sequence[Any]], arguments: Sequence[Any], places: Sequence[Place]
) -> tuple[Callable[..., Any], list[Place]] | None:
    """Return the kernel that ``run`` calls and the place of each kernel argument; None if ``run`` does anything else.

    This calls ``run`` once. All integers among ``arguments`` must differ, because they are identified by value.
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
    if outputs or len(seen) != 1:
        return None
    origins = dict(zip(_keys(arguments), places, strict=True))
    found = [origins.get(key) for key in _keys(seen[0])]
    return None if None in found else (kernel, [place for place in found if place is not None])


def _keys(arguments: Sequence[Any]) -> list[object]:
    """Return what identifies each argument: an integer by its value, anything else by the object."""
    return [argument if isinstance(argument, int) else ("object", id(argument)) for argument in arguments]
