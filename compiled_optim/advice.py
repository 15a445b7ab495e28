"""What is odd about how an optimizer runs, for :meth:`~compiled_optim.Optimizer.explain` to tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compiled_optim import layout
from compiled_optim.backends.eager import EAGER_VARIABLE, asked_for_eager

if TYPE_CHECKING:
    from compiled_optim.account import UnitReport
    from compiled_optim.optimizer import Optimizer
    from compiled_optim.plan import Batch

NAMED = 3
"""So many parameters are named; of the others it is told how many there are."""

MANY_RECOMPILES = 5


def advice(optimizer: Optimizer, batches: Sequence[Batch], units: Sequence[UnitReport]) -> Iterator[str]:
    """Sentences for a person, each with what to do."""
    names = dict(zip(optimizer._params(), optimizer.parameter_names(), strict=True))
    if not optimizer.compile and asked_for_eager():
        yield f"steps run eagerly because {EAGER_VARIABLE} is set; unset it to compile them"
    half = [name for param, name in names.items() if param.dtype == torch.float16 and not optimizer.unscales]
    if half:
        yield (
            f"{_told(half)} in float16: without a gradient scaler small gradients become zero; step by "
            "torch.amp.GradScaler, keep parameters in float32 under torch.autocast, or use bfloat16"
        )
    if not batches:
        return
    idle = _without_gradient(optimizer, batches, names)
    if idle:
        when = "never had a gradient" if _keeps_state(optimizer) else "had no gradient in the last step"
        yield f"{_told(idle)} {when}: not used in the loss? If on purpose, requires_grad_(False) saves their gradients"
    scattered = [
        entry.name
        for batch in batches
        for entry, param in zip(batch.spec.entries, batch.params, strict=True)
        if not layout.is_home(param.detach(), entry.rows)
    ]
    if scattered:
        yield f"{_told(scattered)} not dense in memory: copied before and after every step; make them .contiguous()"
    late = [unit for unit in units if unit.reason]
    if len(late) >= MANY_RECOMPILES:
        yield (
            f"{len(late)} units were compiled after the first step: the reasons are above; if they go on, something "
            "that changes from step to step is an option of the rule or a shape of the model"
        )


def _keeps_state(optimizer: Optimizer) -> bool:
    return optimizer.counts_steps or any(optimizer.initial_state(group) for group in optimizer.param_groups)


def _without_gradient(optimizer: Optimizer, batches: Sequence[Batch], names: dict[Tensor, str]) -> list[str]:
    stepped = {id(entry.param) for batch in batches for entry in batch.spec.entries}
    return [
        name
        for param, name in names.items()
        if param.requires_grad and id(param) not in stepped and not optimizer.own_state.get(param)
    ]


def _told(names: Sequence[str]) -> str:
    """How many parameters, and the names of the first."""
    if len(names) == 1:
        return names[0]
    rest = len(names) - NAMED
    listed = ", ".join(name.removeprefix("parameter ") for name in names[:NAMED])
    return f"{len(names)} parameters ({listed}{f' and {rest} more' if rest > 0 else ''})"
