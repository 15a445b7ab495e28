"""The implementations that are compared: how each is constructed, and when it cannot take part.

Every implementation is listed in the report. One that is not installed, or does not provide an optimizer, is listed
with the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import compiled_optim as co
from perf.optimizers import Rule

Groups = list[dict[str, Any]]
Maker = Callable[[Rule, Groups], torch.optim.Optimizer]


@dataclass
class Entrant:
    """An optimizer of a contender, and a function that runs one full step, including clipping."""

    optimizer: torch.optim.Optimizer
    step: Callable[[], object]


@dataclass(frozen=True)
class Contender:
    """One implementation.

    ``exists_for`` returns whether it provides an optimizer. ``package`` must be importable; ``distribution`` is its
    name on PyPI. ``whole_model`` marks an implementation that compiles all tensors in one graph; its warm-up is slow
    for more than FEW tensors, so there it runs only if --contender is given. ``clips`` marks an implementation that
    clips gradients inside its step; for the others, torch's clip_grad_norm_ is called with ``foreach``.
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
        """Return the reason why the package cannot be imported, or None if it can."""
        if self.package is None or importlib.util.find_spec(self.package) is not None:
            return None
        return "not installed: pip install .[peers]"

    def construct(self, rule: Rule, groups: Sequence[list[Tensor]]) -> torch.optim.Optimizer:
        """Construct the optimizer for these parameter groups."""
        return self.make(rule, [{"params": params} for params in groups])

    def enter(self, rule: Rule, groups: Sequence[list[Tensor]]) -> Entrant:
        """Construct the optimizer for these parameter groups, and the function that runs its full step."""
        optimizer = self.construct(rule, groups)
        run: Callable[[], object] = optimizer.step
        if self.compile_step:
            # the recipe of the PyTorch documentation
            run = torch.compile(lambda: optimizer.step(), fullgraph=False)
        if rule.clip is None or self.clips:
            return Entrant(optimizer, run)
        params = [param for group in groups for param in group]
        clip = partial(torch.nn.utils.clip_grad_norm_, params, rule.clip, foreach=self.foreach)

        def clip_and_step() -> None:
            clip()
            run()

        return Entrant(optimizer, clip_and_step)


def _ours(rule: Rule, groups: Groups, **how: Any) -> torch.optim.Optimizer:
    clip = {"max_grad_norm": rule.clip} if rule.clip is not None else {}
    made: torch.optim.Optimizer = getattr(co, rule.ours)(groups, **rule.options, **clip, **how)
    return made


def _torch(rule: Rule, groups: Groups, **how: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torch.optim, rule.ours)(groups, **{**rule.options, **how})
    return made


def _recipe_optimizer(rule: Rule, groups: Groups) -> torch.optim.Optimizer:
    lr = torch.tensor(rule.options["lr"], device=groups[0]["params"][0].device)
    capturable = {} if rule.entry.fused else {"capturable": True}  # those with a fused form take a tensor as lr anyway
    return _torch(rule, groups, lr=lr, **capturable)


def _published(module: str) -> tuple[Maker, Callable[[Rule], bool]]:
    """Return the constructor of a module's optimizers, and a function that tells which rules the module provides."""

    def make(rule: Rule, groups: Groups) -> torch.optim.Optimizer:
        found = rule.published(module)
        assert found is not None
        cls = getattr(importlib.import_module(module), found.name)
        made: Any = cls(groups, **rule.options, **found.options)
        if hasattr(made, "train"):  # schedulefree starts in eval mode
            made.train()
        return made  # type: ignore[no-any-return]

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
    "schedulefree": Contender(*_published("schedulefree"), package="schedulefree", distribution="schedulefree"),
    "heavyball": Contender(*_published("heavyball"), package="heavyball", distribution="heavyball", whole_model=True),
    "optimi": Contender(*_published("optimi"), package="optimi", distribution="torch-optimi"),
    "deepspeed": Contender(
        *_published("deepspeed.ops.adam"), package="deepspeed", distribution="deepspeed", cpu_only=True
    ),
}

BASELINES = ("torch fused", "torch foreach", "adamp", "usual foreach", "deepspeed", "ours eager")
"""The baseline of the ratios is the first of these that was measured."""

REFERENCES = ("torch loop", "adamp", "usual foreach", "ours eager")
"""The float64 reference of all contenders is the first of these that can run."""


FEW = 20


def not_entered(name: str, rule: Rule, device: str, tensors: int, asked: bool) -> tuple[str, str] | None:
    """Return the status and the reason of a contender that does not run, or None if it runs."""
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
