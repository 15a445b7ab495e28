"""Check by example whether a rule can run on flat buffers."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from compiled_optim.program_checks import example_arguments, sum_stages
from compiled_optim.update_program import UpdateProgram

WIDTH = 4
ROWS = {"first": 3, "second": 4, "padding": 1, "third": 2}
"""The flat example: three tensors with these numbers of rows, and a row of padding."""

NUMBERS = [0, 0, 0, 1, 1, 1, 1, 3, 2, 2]
"""The segment of each row. Segment 3 is padding."""


@lru_cache(maxsize=256)
def works_flat(program: UpdateProgram, rank: int) -> bool:
    """Return True if a rule computes the same on a list of tensors with ``rank`` dimensions and on one flat buffer.

    A rule that loops over tensors, or that sums in other ways than with the methods of
    :class:`~compiled_optim.tensors.Tensors`, may not.
    """
    if rank > 2:
        return False
    program = program.plain
    generator = torch.Generator().manual_seed(0)
    # gradients that are orthogonal to the parameters of the third tensor, which AdamP looks for
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0], device="cpu")

    def example(is_grad: bool) -> list[Tensor]:
        made = [torch.rand(rows, WIDTH, generator=generator, device="cpu") + 0.5 for rows in ROWS.values()]
        made[2].zero_()
        made[3].fill_(1).mul_(signs if is_grad else 1)
        return made

    matrices = [example(i == 0) for i in range(2 + len(program.states))]
    flat = [[torch.cat(each)] for each in matrices]
    lists = [[each[i].clone() if rank > 1 else each[i].reshape(-1) for i in (0, 1, 3)] for each in matrices]
    segments = torch.tensor(NUMBERS, dtype=torch.int32, device="cpu")
    arguments = example_arguments(program)._replace(scalars=torch.full((2 * len(program.scalars),), 0.25, device="cpu"))
    try:
        program(lists, arguments)
        if takes_matrix(program, rank):
            replace(program, segments=4)(flat, arguments._replace(row_segments=segments))
        else:
            program([[matrix.view(-1)] for (matrix,) in flat], arguments)
    except Exception:  # of any kind, because the rule may be the user's
        return False
    return all(
        torch.allclose(
            torch.cat([tensor.view(-1) for tensor in expected]), matrix[segments < 3].view(-1), equal_nan=True
        )
        for expected, (matrix,) in zip(lists, flat, strict=True)
    )


def takes_matrix(program: UpdateProgram, rank: int) -> bool:
    """Return True if a rule sees a flat buffer as a matrix, because it works by rows or sums over tensors."""
    return rank > 1 or (program.reduces and bool(sum_stages(program, rank)))
