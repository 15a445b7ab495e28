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
from perf.storages import OPTIMIZER, OWN, THEIRS, Stored

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
    name on PyPI. ``whole_model`` marks an implementation that compiles each model by itself; its warm-up is slow for
    more than FEW tensors, so there it runs only if --contender is given. ``clips`` marks an implementation that
    clips gradients inside its step; for the others, torch's clip_grad_norm_ is called with ``foreach``. ``stored`` is
    given for a contender that differs from another one in its storage only; it runs for parameters of that dtype, in
    cases that compare storages or if --contender is given.
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
    stored: Stored | None = None

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


def _eight_bit(module: str) -> Maker:
    """Return the constructor of the AdamW8bit of a module."""

    def make(rule: Rule, groups: Groups) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = importlib.import_module(module).AdamW8bit(groups, **rule.options)
        return made

    return make


def _is_stored(rule: Rule) -> bool:
    return rule.ours == OPTIMIZER and rule.clip is None


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
    **{name: Contender(partial(_ours, **way.options), _is_stored, stored=way) for name, way in OWN.items()},
    **{
        name: Contender(
            _eight_bit(module), _is_stored, package, package, stored=way, whole_model=package == "torchao"
        )  # torchao compiles each parameter in a graph of its own
        for name, (package, module, way) in THEIRS.items()
    },
}

BASELINES = ("torch fused", "torch foreach", "adamp", "usual foreach", "deepspeed", "ours eager")
"""The baseline of the ratios is the first of these that was measured."""

REFERENCES = ("torch loop", "adamp", "usual foreach", "ours eager")
"""The float64 reference of all contenders is the first of these that can run."""


FEW = 20


def not_entered(
    name: str, rule: Rule, device: str, tensors: int, asked: bool, dtype: str = "float32"
) -> tuple[str, str] | None:
    """Return the status and the reason of a contender that does not run, or None if it runs."""
    contender = CONTENDERS[name]
    if not contender.exists_for(rule):
        return "none", f"has no {rule.ours}"
    if contender.stored is not None and contender.stored.dtype != dtype:
        return "none", f"is for {contender.stored.dtype} parameters"
    if contender.cpu_only and device != "cpu":
        return "none", "runs on the CPU only"
    if (reason := contender.absent()) is not None:
        return "absent", reason
    if contender.whole_model and tensors > FEW and not asked:
        return "skipped", f'compiles all {tensors} tensors, which takes a minute or more: --contender "{name}"'
    return None
