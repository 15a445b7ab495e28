"""Compare compiled code with the eager program before it is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from compiled_optim.backends.base import Shape, Signature
from compiled_optim.errors import BackendUnavailableError
from compiled_optim.program import Arguments, TensorLists

ExampleArguments = Mapping[str, Tensor]

FOUND_INF = "found_inf"

TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 2e-2}


def examples(signature: Signature, shapes: Sequence[Shape]) -> tuple[TensorLists, ExampleArguments]:
    """Return example inputs for a signature: random values in [0.5, 1.5), the same in every call."""
    generator = torch.Generator().manual_seed(0)
    list_shape, device = signature.program.list_shape, signature.device
    specs = [(list_shape(i, shape), dtype, device) for i, dtype in enumerate(signature.dtypes) for shape in shapes]
    for name, dtype, shape in signature.arguments:
        specs.append((shape, dtype, "cpu" if name == "scalars" else signature.device))
    # longer than needed: a graph with a wrong order of inputs must fail the comparison, not read out of bounds
    longer = [torch.rand(max(256, math.prod(s)), generator=generator, device="cpu") + 0.5 for s, _, _ in specs]
    made = [
        values.to(device, dtype)[: math.prod(shape)].view(shape)
        for values, (shape, dtype, device) in zip(longer, specs, strict=True)
    ]
    width, count = len(shapes), len(signature.dtypes)
    lists = [made[i * width : (i + 1) * width] for i in range(count)]
    return lists, {spec.name: tensor for spec, tensor in zip(signature.arguments, made[count * width :], strict=True)}


def agrees(
    signature: Signature,
    shapes: Sequence[Shape],
    run: Callable[[TensorLists, ExampleArguments], Sequence[Tensor]],
) -> bool:
    """Return True if ``run`` and the eager program compute the same on example tensors of these shapes.

    A program that takes ``found_inf`` is run with 0, and with 1.
    """
    for found_inf in (0.0, 1.0):
        lists, arguments = examples(signature, shapes)
        expected_lists, expected_arguments = examples(signature, shapes)
        for given in (arguments, expected_arguments):
            if FOUND_INF in given:
                given[FOUND_INF].fill_(found_inf)
        outputs = run(lists, arguments)
        expected = signature.program(expected_lists, Arguments(**expected_arguments))
        pairs = [(a, b) for xs, ys in zip(lists, expected_lists, strict=True) for a, b in zip(xs, ys, strict=True)]
        if expected is not None:
            pairs.append((outputs[0], expected))
        if not all(is_close(a, b) for a, b in pairs):
            return False
        if FOUND_INF not in arguments:
            break
    return True


def is_close(actual: Tensor, expected: Tensor) -> bool:
    """Return True if two tensors are equal up to rounding."""
    absolute = relative = TOLERANCES.get(expected.dtype, 1e-3)
    if expected.dtype == torch.uint8:  # codes: one step, because a rounding error may cross the border of a code
        absolute, relative = 1.0, 0.0
    return torch.allclose(actual.cpu().double(), expected.cpu().double(), relative, absolute, equal_nan=True)


def disagreement(signature: Signature) -> BackendUnavailableError:
    """Return the error for a unit whose results differ from those of the eager program."""
    return BackendUnavailableError(
        f"the compiled code of {signature} does not compute what its eager form does, so it is not used: "
        f"torch {torch.__version__} is not supported on this machine; pass compile=False to run the same step eagerly"
    )
