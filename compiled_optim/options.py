"""The keyword-only options of all optimizers: types for the signatures of constructors, and checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

from compiled_optim.backends import Backend, Layout
from compiled_optim.engine.storage_options import Rounding, StateDtype

TORCH_SWITCHES: dict[str, bool | None] = {"foreach": None, "capturable": False, "differentiable": False}
"""Options of torch.optim and their defaults. Optimizers that torch.optim has too accept them; they have no effect."""


@dataclass
class Settings:
    """The options of an optimizer that control how its steps run."""

    compile: bool
    backend: Backend | None
    on_realloc: Literal["recompile", "raise"]
    layout: Layout | None = None

    def layout_for(self, backend: Backend) -> Layout:
        """Return the layout that is used with a backend: the chosen one, or its default if it lacks that one."""
        return self.layout if self.layout is not None and self.layout in backend.layouts else backend.layouts[0]


class RunOptions(TypedDict, total=False):
    """Keyword-only options that every optimizer takes after its own arguments."""

    compile: bool
    backend: str | Backend | None
    on_realloc: Literal["recompile", "raise"]
    layout: Layout | None
    fused: bool | None
    in_backward: bool
    max_grad_norm_per_parameter: float | None
    ema_decay: float | None
    ema_warmup: bool
    state_dtype: StateDtype | None
    rounding: Rounding | None
    master_weights: bool
    rounding_seed: int
    cautious: bool


class EngineOptions(RunOptions, total=False):
    """The options of optimizers that do not define their own ``max_grad_norm``."""

    max_grad_norm: float | None


class TorchOptions(EngineOptions, total=False):
    """The options of optimizers that torch.optim has too. The additional ones have no effect."""

    foreach: bool | None
    capturable: bool
    differentiable: bool


class TorchDecayOptions(TorchOptions, total=False):
    """The options of optimizers that torch.optim has too, and whose weight decay is a part of the gradient there."""

    decoupled_weight_decay: bool


def check_options(
    optimizer: str,
    has_torch_switches: bool,
    switches: Mapping[str, Any],
    on_realloc: str,
    max_norms: Mapping[str, float | None],
    layout: str | None,
    in_backward: bool,
) -> None:
    """Raise if an option is unknown or out of range."""
    unknown = switches.keys() - (TORCH_SWITCHES if has_torch_switches else {}).keys()
    if unknown:
        raise TypeError(f"{optimizer} got an unexpected keyword argument {min(unknown)!r}")
    if switches.get("differentiable"):
        raise NotImplementedError(
            "differentiable=True is not supported: a compiled step is not recorded by autograd; use torch.optim"
        )
    if on_realloc not in ("recompile", "raise"):
        raise ValueError(f'Invalid on_realloc value: {on_realloc!r}; use "recompile" or "raise"')
    for name, max_norm in max_norms.items():
        if max_norm is not None and not max_norm >= 0.0:
            raise ValueError(f"Invalid {name} value: {max_norm}")
    if layout not in (None, *get_args(Layout)):
        raise ValueError(f'Invalid layout value: {layout!r}; use None, "tensors" or "flat"')
    if layout == "flat" and in_backward:
        raise ValueError(
            f"{optimizer} cannot have both in_backward=True and layout='flat': a flat buffer is updated once all "
            "gradients are there; use layout=None"
        )
