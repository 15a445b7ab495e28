"""The keyword-only options of optimizers, for type checkers: what a constructor passes on to the base class."""

from __future__ import annotations

from typing import Literal, TypedDict

from compiled_optim.backends import Backend

TORCH_SWITCHES: dict[str, bool | None] = {
    "foreach": None,
    "fused": None,
    "capturable": False,
    "differentiable": False,
}


class RunOptions(TypedDict, total=False):
    """Keyword-only options that every optimizer takes after its own arguments."""

    compile: bool
    backend: str | Backend | None
    on_realloc: Literal["recompile", "raise"]


class EngineOptions(RunOptions, total=False):
    """The same for optimizers that have no ``max_grad_norm`` of their own."""

    max_grad_norm: float | None


class TorchOptions(EngineOptions, total=False):
    """The same for optimizers torch also has: its switches are accepted and have no effect."""

    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool
