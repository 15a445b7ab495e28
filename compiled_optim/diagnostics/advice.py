"""The advice of ``explain()``: find what is unusual about how an optimizer runs, and name the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from compiled_optim.backends.eager import EAGER_VARIABLE, eager_requested
from compiled_optim.diagnostics.text import name_some
from compiled_optim.diagnostics.units import UnitReport
from compiled_optim.engine.plan import Plan
from compiled_optim.engine.states import State

MANY_RECOMPILES = 5


def advice(
    names: Mapping[Tensor, str], state: State, plan: Plan | None, units: Sequence[UnitReport], unscales: bool
) -> Iterator[str]:
    """Yield one sentence for each finding, with its remedy.

    ``names`` are the names of all parameters. ``unscales`` is True if a GradScaler has left unscaling to a step.
    """
    if eager_requested():
        yield f"steps run eagerly because {EAGER_VARIABLE} is set; unset it to compile them"
    half = [name for param, name in names.items() if param.dtype == torch.float16 and not unscales]
    if half:
        yield (
            f"{name_some(half)} in float16: without a gradient scaler small gradients become zero; keep parameters in "
            "float32 under torch.autocast, use bfloat16, or use torch.amp.GradScaler and pass fused=True"
        )
    if plan is None:
        return
    stepped = {id(entry.param) for entry in plan.entries}
    unused = [
        name
        for param, name in names.items()
        if param.requires_grad and id(param) not in stepped and not state.get(param)
    ]
    if unused:
        when = "never had a gradient" if plan.keeps_state else "had no gradient in the last step"
        yield (
            f"{name_some(unused)} {when}: check that the loss uses them; if this is intended, requires_grad_(False) "
            "saves the memory of their gradients"
        )
    copied = [names[entry.param] for bound in plan.buckets for entry in bound.copied]
    if copied:
        yield f"{name_some(copied)} not dense in memory: copied before and after every step; make them .contiguous()"
    not_flat = [entry for bound in plan.buckets if bound.bucket.is_outside for entry in bound.bucket.entries]
    outside = [names[entry.param] for entry in not_flat if entry.param.numel()]
    if outside:
        yield (
            f"{name_some(outside)} not in a flat buffer, so the number of operations grows with them; "
            "`p.data = p.data.clone()` gives a view of another tensor memory of its own, and docs/backends.md lists "
            "what else stays where it is"
        )
    for unit in units:
        if unit.limit:
            yield f"{unit.name} runs one tensor at a time, because {unit.limit}"
    late = [unit for unit in units if unit.reason]
    if len(late) >= MANY_RECOMPILES:
        yield (
            f"{len(late)} units were compiled after the first step; the reasons are listed above. If this continues, "
            "a flag of the rule or a shape of the model changes from step to step"
        )
