"""Compare table units with the eager program before they are used."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from compiled_optim.backends.base import BoundArguments, Call, ScalarRows, Shape, Signature
from compiled_optim.backends.table import in_blocks
from compiled_optim.backends.tracing import compiled_sizes
from compiled_optim.backends.verification import is_close
from compiled_optim.program import Arguments, TensorLists
from compiled_optim.quantization import BLOCK, blocks

VERIFIED_SIZES = (37, 1, 64, 3, 90, 0)
VERIFIED_MATRICES: list[Shape] = [
    (1, 37, 5),
    (1, 1, 7),
    (2, 20, 3),
    (3, 40, 4),
    (1, 9, 1),
    (2, 0, 3),
    (0, 3, 2),
    (1, 4, 0),
]
VERIFIED_CHUNK = 16
"""Elements in a chunk during verification; small, so that small tensors consist of several chunks."""


class TableUnitLike(Protocol):
    """A unit that takes any number of tensors, which it cuts into chunks."""

    whole_blocks: bool
    """Whether all blocks of quantised tensors must have BLOCK elements."""

    def bind(self, shapes: Sequence[Shape], lists: TensorLists, arguments: BoundArguments, chunk: int) -> Call:
        """Bind the unit to tensors, cut into chunks of about ``chunk`` elements."""


def table_agrees(signature: Signature, unit: TableUnitLike) -> bool:
    """Return True if a unit agrees with the eager program on tensors of several sizes, with two rows of scalars.

    One tensor has no gradient, and must not change. The gradients are passed in other shapes than the parameters,
    because a unit uses only their addresses. A unit that takes ``found_inf`` is run once more, and must change nothing.
    """
    sizes = compiled_sizes(signature) or (5,) * (signature.rank - 1)
    shapes: list[Shape] = [(size, *sizes) for size in VERIFIED_SIZES]
    if signature.rank > 2 and not compiled_sizes(signature):
        shapes = VERIFIED_MATRICES
    if signature.program.has_blocks:  # the driver gets these 1-D tensors in blocks, the eager program as they are
        shapes = [(size,) for size in (*VERIFIED_SIZES, 3 * BLOCK, 2 * BLOCK + 9)]
        if unit.whole_blocks:
            shapes = [(count * BLOCK,) for count in (3, 1, 2, 0)]
    skipped = 2
    arguments = _example_arguments(signature, len(shapes))
    lists, expected = (_example_lists(signature, shapes) for _ in range(2))
    bound_shapes = list(map(in_blocks, shapes)) if signature.program.has_blocks else shapes
    grads: list[Tensor | None] = [grad.view(1, -1, 1) for grad in lists[0]]
    grads[skipped] = None
    call = unit.bind(bound_shapes, lists[1:], arguments, chunk=VERIFIED_CHUNK)
    result = call(grads)
    pairs = []
    for i in range(len(shapes)):
        own = [[tensors[i]] for tensors in expected]
        row = 0 if arguments.scalars is None else arguments.scalars.row_of[i]
        known = {name: tensor.to(signature.device) for name, tensor in arguments.of_row(row).items()}
        if arguments.totals is not None:
            known["totals"] = arguments.totals[:, i]
        returned = None
        if i != skipped and own[0][0].numel():
            returned = signature.program(own, Arguments(**known))
        pairs += [(tensors[i], kept[0]) for tensors, kept in zip(lists, own, strict=True)]
        if result is not None:
            zeros = torch.zeros_like(result[:, i])
            pairs.append((result[:, i], zeros if returned is None else returned.reshape(zeros.shape)))
    if not all(is_close(a, b) for a, b in pairs):
        return False
    if arguments.found_inf is None:
        return True
    before = [tensor.clone() for tensors in lists for tensor in tensors]
    arguments.found_inf.fill_(1.0)
    call(grads)
    return all(map(torch.equal, before, (tensor for tensors in lists for tensor in tensors)))


def _example_lists(signature: Signature, shapes: Sequence[Shape]) -> TensorLists:
    """Return random values in [0.5, 1.5), the same in every call."""
    generator = torch.Generator().manual_seed(0)

    def example(number: int, dtype: torch.dtype, shape: Shape) -> Tensor:
        own = signature.program.list_shape(number, shape)
        if number in signature.program.row_lists and signature.program.has_blocks:
            own = (blocks(shape[0]),)
        values = torch.rand(own, generator=generator, device="cpu") + 0.5
        return (values * 100 if dtype == torch.uint8 else values).to(signature.device, dtype)

    return [[example(number, dtype, shape) for shape in shapes] for number, dtype in enumerate(signature.dtypes)]


def _example_arguments(signature: Signature, tensors: int) -> BoundArguments:
    """Return example arguments with two rows of scalars. The tensors have them by turns."""
    generator = torch.Generator().manual_seed(1)
    made: dict[str, Any] = {}
    for name, dtype, shape in signature.arguments:
        values = torch.rand(tensors, max(math.prod(shape), 1), generator=generator, device="cpu").to(dtype) + 0.5
        if name == "scalars":
            rows = made[name] = ScalarRows(shape[0] // 2, tensors, dtype)
            # below 1, like a decay: beyond it, an average of squares may be negative, and its root NaN
            rows.tensor.copy_(values[:, : shape[0]] / 2 + 0.25)
            rows.row_of[:] = array("q", [i % 2 for i in range(tensors)])
        elif name == "found_inf":
            made[name] = torch.zeros((), dtype=dtype, device=signature.device)
        elif name == "totals":
            made[name] = values.T.to(signature.device)
        else:
            made[name] = (values[0, 0] if name == "inv_scale" else values[:, 0]).to(signature.device)
    return BoundArguments(**made)
