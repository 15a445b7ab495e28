"""What an update rule does with the elements of a tensor, found by running it on small tensors."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from compiled_optim.program import Arguments
from compiled_optim.stages import SplitMean
from compiled_optim.update_program import Part, Phase, UpdateProgram


def sum_stages(program: UpdateProgram, rank: int) -> tuple[int, ...]:
    """Return the number of sums over each tensor with ``rank`` dimensions in each stage; 0 for a stage of means.

    For the part PREPARE these are the stages before the map of matrices.
    """
    return _stages(program, rank)[0]


def split_means(program: UpdateProgram, rank: int) -> tuple[SplitMean, ...]:
    """Return the means of a program that are stages."""
    return _stages(program, rank)[1]


@lru_cache(maxsize=256)
def _stages(program: UpdateProgram, rank: int) -> tuple[tuple[int, ...], tuple[SplitMean, ...]]:
    """Return the number of sums in each stage, and the means that are stages. The program is run once."""
    program = replace(program.plain, phase=Phase.WHOLE, means=())
    extra = int(program.part is not Part.WHOLE)
    shapes = (program.list_shape(i, (2,) * rank) for i in range(2 + len(program.states) + extra))
    lists = [[torch.ones(shape, device="cpu")] for shape in shapes]
    stages = program.run_stages(lists, example_arguments(program))
    return tuple(map(len, stages.sums)), tuple(stages.means)


def example_arguments(program: UpdateProgram) -> Arguments:
    """Return example arguments for a program: all ones, on the CPU, in float32."""
    one = torch.ones((), device="cpu")
    return Arguments(torch.ones(2 * len(program.scalars), device="cpu"), inv_scale=one, grad_scale=one)


@lru_cache(maxsize=256)
def is_elementwise(program: UpdateProgram, rank: int) -> bool:
    """Return True if a rule computes the same on a tensor with ``rank`` dimensions and on its parts; it runs on both.

    The parts consist of whole rows or matrices, because rowwise rules, and those for matrices, never get others.
    """
    generator = torch.Generator().manual_seed(0)

    def example(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu") + 0.5

    program = program.plain
    shape = (6, *(3,) * (rank - 1))
    lists = [example(*program.list_shape(i, shape)) for i in range(2 + len(program.states))]
    arguments = example_arguments(program)._replace(scalars=example(2 * len(program.scalars)) / 2)
    whole = [[tensor.clone()] for tensor in lists]
    parts = [[tensor[:2].clone(), tensor[2:].clone()] for tensor in lists]
    program(whole, arguments)
    program(parts, arguments)
    return all(_agree(one, torch.cat(several)) for (one,), several in zip(whole, parts, strict=True))


def _agree(whole: Tensor, parts: Tensor) -> bool:
    """Return True if both results are the same. Random states may give NaN, but not everywhere: that shows nothing."""
    return torch.allclose(whole, parts, rtol=1e-4, equal_nan=True) and not bool(whole.isnan().all())
