"""What an optimizer defines beyond its constructor: the formula, and the numbers the formula needs.

The signature of ``update`` is the declaration; docs/rules.md explains it. ``validation`` checks rules of users.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch

from compiled_optim.engine.checks import check_usual
from compiled_optim.errors import RuleError
from compiled_optim.locations import definition
from compiled_optim.program import UpdateProgram

Group = dict[str, Any]

BETA_NAMES = tuple(f"beta{i}" for i in range(1, 10))
"""The names by which a formula gets the values of ``betas``."""

ALL_REDUCE = "all_reduce"
"""The keyword argument by which a rule says that it sums over tensors."""


@dataclass(frozen=True)
class Clip:
    """Gradients are scaled down to a norm of at most ``max_norm``, measured over all that have the same ``pool``.

    The pool None is all gradients of the optimizer, those of groups that are not clipped included.
    """

    max_norm: float
    pool: Hashable = None
    eps: float = 1e-6


class Declaration(NamedTuple):
    """What the signature of ``update`` declares: states, which of them are optional, and keyword arguments."""

    states: tuple[str, ...]
    optional: frozenset[str]
    keywords: tuple[str, ...]


class Variant(NamedTuple):
    """What a group's hyperparameters select of a rule; another variant is another program."""

    states: tuple[str, ...]
    flags: tuple[tuple[str, bool], ...]
    maximize: bool
    clips: bool


class Row(NamedTuple):
    """A group's hyperparameters in one step, as the formula gets them."""

    scalars: dict[str, float]
    variant: Variant


@lru_cache(maxsize=1024)
def declaration(update: Callable[..., None]) -> Declaration:
    """Return what an update rule's signature declares."""
    _, _, *rest = inspect.signature(update).parameters.values()
    states = [parameter for parameter in rest if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    return Declaration(
        tuple(state.name for state in states),
        frozenset(state.name for state in states if state.default is None),
        tuple(p.name for p in rest if p.kind is p.KEYWORD_ONLY and p.name != ALL_REDUCE),
    )


class Rule:
    """The formula of an optimizer, and what the engine asks about it."""

    counts_steps: ClassVar[bool] = True
    """Whether the state has a ``step``. If not, ``derived`` gets 1 until a parameter has states, and 2 from then on."""

    rowwise: ClassVar[bool] = False
    """Whether ``update`` sees parameters of two and more dimensions by rows, as 2-D tensors."""

    initial_values: ClassVar[Mapping[str, float]] = {}
    """The values states start at, if not zero."""

    max_grad_norm: float | None = None

    update: ClassVar[Callable[..., None]]
    """The formula, a static method over lists of tensors, in place: ``update(p, g, *states, *, hyperparameters)``.

    Positional arguments after the parameters and gradients are states; with the default None a state is optional.
    Keyword-only arguments are hyperparameters: values of :meth:`derived`, entries of the group, or ``beta1``,
    ``beta2`` ... of its ``betas``. Numbers reach the formula as scalars, bools are compiled in.
    """

    def check(self, group: Group) -> None:
        """Raise ValueError if a hyperparameter is out of range. The default checks the usual ones by torch's names."""
        check_usual(group)

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        """Return what the formula needs beyond the group's own entries, for this step (1 is the first).

        Runs on the host, in double precision, once a step. A bool under the name of an optional state says whether
        the group keeps that state.
        """
        return {}

    def clips(self, group: Group, dtype: torch.dtype) -> list[Clip]:
        """Return by which norms a group's gradients of one dtype are clipped before the update, in order."""
        return [Clip(self.max_grad_norm)] if self.max_grad_norm is not None else []

    def row(self, group: Group, step: int) -> Row:
        """Return this step's hyperparameters: the numbers, and what they select of the rule."""
        states, optional, keywords = declaration(type(self).update)
        derived = self.derived(group, step)
        known = {**dict(zip(BETA_NAMES, group.get("betas", ()), strict=False)), **group, **derived}
        scalars: dict[str, float] = {}
        flags = []
        for name in keywords:
            if name not in known:
                raise self._undeclared(name)
            value = known[name]
            if value is True or value is False:
                flags.append((name, value))
            else:
                scalars[name] = float(value)
        kept = tuple(state for state in states if state not in optional or derived.get(state)) if optional else states
        clips = bool(self.clips(group, torch.float32))
        return Row(scalars, Variant(kept, tuple(flags), bool(group["maximize"]), clips))

    def program(self, group: Group, scaled: bool = False) -> UpdateProgram:
        """Return the program for a group's options; ``scaled`` if its gradients are multiplied by a tensor anyway."""
        scalars, variant = self.row(group, 1)
        return UpdateProgram(
            name=type(self).__name__,
            update=type(self).update,
            states=variant.states,
            scalars=tuple(scalars),
            flags=variant.flags,
            scaled=scaled or variant.maximize or variant.clips,
        )

    def _undeclared(self, name: str) -> RuleError:
        rule = type(self)
        remedy = (
            "put a hyperparameter into the defaults that the constructor hands to super().__init__(params, defaults), "
            "or return its value from derived(); a state is an argument before the `*`"
        )
        return RuleError(
            f"{rule.__name__}.update needs {name!r}, which nothing gives it", definition(rule.update), remedy
        )
