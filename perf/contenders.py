"""Who competes: a table of implementations, each with a way to make it and a reason where it cannot enter.

Nobody is dropped in silence: an implementation that is not installed or does not exist for an optimizer is listed with
the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import compiled_optim as co
from perf.optimizers import Rule

Maker = Callable[[Rule, list[Tensor]], torch.optim.Optimizer]


@dataclass
class Entrant:
    """An optimizer that was entered, and one full step of it, clipping included."""

    optimizer: torch.optim.Optimizer
    step: Callable[[], object]


@dataclass(frozen=True)
class Contender:
    """One implementation, of the optimizers that it ``exists_for``.

    ``package`` must be importable; ``distribution`` is its name on PyPI. One that compiles the ``whole_model`` takes
    long to warm up on more than a FEW tensors, and enters there only when it is asked for. One that ``clips`` does so
    inside its step; for the others it is torch's clip_grad_norm_, by ``foreach`` or not.
    """

    make: Maker
    exists_for: Callable[[Rule], bool]
    package: str | None = None
    distribution: str = ""
    whole_model: bool = False
    compile_step: bool = False
    cpu_only: bool = False
    clips: bool = False
    foreach: bool = True

    def absent(self) -> str | None:
        """Why the implementation is not there at all, or None."""
        if self.package is None or importlib.util.find_spec(self.package) is not None:
            return None
        return "not installed: pip install .[peers]"

    def enter(self, rule: Rule, params: list[Tensor]) -> Entrant:
        """Make the optimizer over these parameters."""
        optimizer = self.make(rule, params)
        run: Callable[[], object] = optimizer.step
        if self.compile_step:
            # as torch's documentation has it
            run = torch.compile(lambda: optimizer.step(), fullgraph=False)
        if rule.clip is None or self.clips:
            return Entrant(optimizer, run)
        clip = partial(torch.nn.utils.clip_grad_norm_, params, rule.clip, foreach=self.foreach)

        def clip_and_step() -> None:
            clip()
            run()

        return Entrant(optimizer, clip_and_step)


def _ours(rule: Rule, params: list[Tensor], **how: Any) -> torch.optim.Optimizer:
    clip = {"max_grad_norm": rule.clip} if rule.clip is not None else {}
    made: torch.optim.Optimizer = getattr(co, rule.ours)(params, **rule.options, **clip, **how)
    return made


def _torch(rule: Rule, params: list[Tensor], **how: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torch.optim, rule.ours)(params, **{**rule.options, **how})
    return made


def _recipe_optimizer(rule: Rule, params: list[Tensor]) -> torch.optim.Optimizer:
    lr = torch.tensor(rule.options["lr"], device=params[0].device)
    capturable = {"capturable": True} if rule.ours in ("RMSprop", "Adadelta") else {}
    return _torch(rule, params, lr=lr, **capturable)


def _published(module: str) -> tuple[Maker, Callable[[Rule], bool]]:
    """Return how to make the optimizers of another module, and for which rules it has one."""

    def make(rule: Rule, params: list[Tensor]) -> torch.optim.Optimizer:
        found = rule.published(module)
        assert found is not None
        cls = getattr(importlib.import_module(module), found.name)
        made: torch.optim.Optimizer = cls(params, **rule.options, **found.options)
        return made

    return make, lambda rule: rule.published(module) is not None


OURS = "ours"
CONTENDERS: dict[str, Contender] = {
    OURS: Contender(_ours, lambda rule: True, clips=True),
    "ours eager": Contender(partial(_ours, compile=False), lambda rule: True, clips=True),
    "torch fused": Contender(partial(_torch, fused=True), lambda rule: rule.entry.fused),
    "torch foreach": Contender(partial(_torch, foreach=True), lambda rule: rule.entry.in_torch),
    "torch loop": Contender(partial(_torch, foreach=False), lambda rule: rule.entry.in_torch, foreach=False),
    "torch.compile(step)": Contender(
        _recipe_optimizer, lambda rule: rule.entry.in_torch, whole_model=True, compile_step=True
    ),
    "usual foreach": Contender(*_published("perf.peers")),
    "adamp": Contender(*_published("adamp"), package="adamp", distribution="adamp"),
    "heavyball": Contender(*_published("heavyball"), package="heavyball", distribution="heavyball", whole_model=True),
    "optimi": Contender(*_published("optimi"), package="optimi", distribution="torch-optimi"),
    "deepspeed": Contender(
        *_published("deepspeed.ops.adam"), package="deepspeed", distribution="deepspeed", cpu_only=True
    ),
}

BASELINES = ("torch fused", "torch foreach", "adamp", "usual foreach", "ours eager")
"""What ratios are to: the first of these that was measured."""

REFERENCES = ("torch loop", "adamp", "usual foreach", "ours eager")
"""What every contender is checked against, in float64: the first of these that can enter."""


FEW = 20


def not_entered(name: str, rule: Rule, device: str, tensors: int, asked: bool) -> tuple[str, str] | None:
    """The status and the reason of a contender that does not run, or None if it does."""
    contender = CONTENDERS[name]
    if not contender.exists_for(rule):
        return "none", f"has no {rule.ours}"
    if contender.cpu_only and device != "cpu":
        return "none", "runs on the CPU only"
    if (reason := contender.absent()) is not None:
        return "absent", reason
    if contender.whole_model and tensors > FEW and not asked:
        return "skipped", f'compiles {tensors} tensors in one graph, which takes a minute or more: --contender "{name}"'
    return None
