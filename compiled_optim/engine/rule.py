"""The interface of an update rule: the formula, and the hyperparameters it needs.

The signature of ``update`` declares states and hyperparameters; see docs/rules.md. ``rule_validation`` checks rules of
users.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from compiled_optim.engine.hyperparameters import check_usual
from compiled_optim.engine.matrix_map import MatrixCut, MatrixMap
from compiled_optim.engine.storage_options import uses_seed
from compiled_optim.errors import RuleError
from compiled_optim.locations import definition
from compiled_optim.noise import step_seed
from compiled_optim.update_program import (
    EMA,
    EMA_DECAY,
    FUNCTIONS,
    MAX_NORM,
    SEED,
    SHRINK,
    UpdateProgram,
)

Group = dict[str, Any]

Constants = tuple[tuple[str, float], ...]
"""Names and values of numbers that do not change from step to step."""

WARMUP_STEPS = 10
"""With ``ema_warmup`` the decay of the average in step t is at most t / (t + 9)."""

DECOUPLED = "decoupled_weight_decay"
"""The option of a group that decouples weight decay from the gradient. Some optimizers define it themselves."""

DTYPE_EPS = "dtype_eps"
"""A hyperparameter that every rule may take: the machine epsilon of the dtype of the parameter."""

BETA_NAMES = tuple(f"beta{i}" for i in range(1, 10))
"""The names by which a formula gets the values of ``betas``."""


def all_params(groups: Sequence[Group]) -> list[Tensor]:
    """Return the parameters of all groups, in their order."""
    return [param for group in groups for param in group["params"]]


@dataclass(frozen=True)
class Clip:
    """Clip gradients to a norm of ``max_norm``, computed over all gradients with the same ``pool``.

    The pool None contains all gradients of the optimizer, including those of groups that are not clipped.
    """

    max_norm: float
    pool: Hashable = None
    eps: float = 1e-6


class Declaration(NamedTuple):
    """The states, the optional ones among them, and the keyword arguments in the signature of ``update``."""

    states: tuple[str, ...]
    optional: frozenset[str]
    keywords: tuple[str, ...]


class Variant(NamedTuple):
    """The states and flags that the hyperparameters of a group select. Each variant is a separate program."""

    states: tuple[str, ...]
    flags: tuple[tuple[str, bool], ...]
    maximize: bool
    clips: bool
    own_scalars: tuple[str, ...]
    cautious: bool


class Row(NamedTuple):
    """The hyperparameters of a group in one step, as the formula gets them."""

    scalars: dict[str, float]
    variant: Variant


@lru_cache(maxsize=1024)
def declaration(update: Callable[..., None]) -> Declaration:
    """Return the declaration in the signature of an update rule."""
    _, _, *rest = inspect.signature(update).parameters.values()
    states = [parameter for parameter in rest if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    return Declaration(
        tuple(state.name for state in states),
        frozenset(state.name for state in states if state.default is None),
        tuple(p.name for p in rest if p.kind is p.KEYWORD_ONLY and p.name not in FUNCTIONS),
    )


def by_name(group: Group, derived: Mapping[str, float | bool]) -> dict[str, Any]:
    """Return the hyperparameters that a formula can ask for: those of the group, its betas, and derived ones."""
    if "betas" in group:
        return {**dict(zip(BETA_NAMES, group["betas"], strict=False)), **group, **derived}
    return {**group, **derived}


class Rule:
    """The formula of an optimizer, and the methods the engine calls."""

    counts_steps: bool = True
    """Whether the state has a ``step``. If not, ``derived`` gets 1 until a parameter has states, and 2 afterwards.

    An optimizer that rounds stochastically counts steps in any case.
    """

    rowwise: ClassVar[bool] = False
    """Whether ``update`` sees parameters of two and more dimensions by rows, as 2-D tensors."""

    matrices: ClassVar[bool] = False
    """Whether ``update`` sees parameters of two and more dimensions as stacks of matrices.

    They are 3-D tensors then: the last two dimensions of the parameter, and all others as one. A rule with the argument
    ``mean_over`` can step sharded matrices, and chunks of rows on the CPU: it is a function that returns the means of
    tensors over a dimension, -1 or -2, and over all shards or chunks.
    """

    reduced_states: ClassVar[Mapping[str, int]] = {}
    """States that have the size 1 in one dimension, -1 or -2. Only parameters that are seen as matrices have them."""

    vector_states: ClassVar[frozenset[str]] = frozenset()
    """States that only parameters of one dimension or none have."""

    sums_over_all: ClassVar[bool] = False
    """Whether ``all_reduce`` adds up the sums of all parameters of the optimizer, instead of those of each tensor.

    Such a rule passes over all gradients before the first parameter is updated. :meth:`after_step` gets the sums on the
    host, which waits for the device.
    """

    takes_complex: ClassVar[bool] = True
    """Whether complex parameters can be stepped. ``update`` sees them as real ones."""

    initial_values: ClassVar[Mapping[str, float | str | None]] = {}
    """The initial values of states, if not zero. A string is the name of a hyperparameter with that value.

    A state with the initial value None starts as a copy of the parameter. It is never kept in 8 bits.
    """

    numbers: ClassVar[Mapping[str, float | str]] = {}
    """Numbers that each parameter keeps in addition to ``step``, and their initial values as in ``initial_values``.

    In the state they are 0-dim tensors. :meth:`derived` gets them as entries of the group. What it returns under the
    name of a number is its value after the step.
    """

    nonnegative: ClassVar[frozenset[str]] = frozenset(
        {"acc_delta", "exp_avg_sq", "exp_inf", "max_exp_avg_sq", "square_avg", "step_size", "sum"}
    )
    """The names of states that are never negative. In 8 bits they need no sign, and never become zero."""

    sparse_alternative: ClassVar[str] = "SparseAdam"
    """The optimizer of torch.optim that the message about sparse gradients recommends. No rule takes them."""

    max_grad_norm: float | None = None
    max_grad_norm_per_parameter: float | None = None

    update: ClassVar[Callable[..., None]]
    """The formula, a static method over lists of tensors, in place: ``update(p, g, *states, *, hyperparameters)``.

    Positional arguments after the parameters and gradients are states; with the default None a state is optional.
    Keyword-only arguments are hyperparameters: values of :meth:`derived`, entries of the group, or ``beta1``,
    ``beta2`` ... of its ``betas``. Numbers reach the formula as scalars, bools are compiled in.
    """

    def check(self, group: Group) -> None:
        """Raise ValueError if a hyperparameter is out of range. The default is ``hyperparameters.check_usual``."""
        check_usual(group)

    def derived(self, group: Group, step: int) -> Mapping[str, float | bool]:
        """Return the values for this step that are not entries of the group; the first step is 1.

        This runs on the host, in double precision, in each step once for each row. A bool with the name of an
        optional state selects whether the group keeps that state.
        """
        return {}

    def before_step(self, groups: Sequence[Group]) -> None:
        """Raise if these groups cannot be stepped now. This is called first in each step, before the closure."""

    def after_step(self, group: Group, sums: Sequence[float] = ()) -> Mapping[str, Any]:
        """Return the entries of a group that a step changes. They are written after all parameters were stepped.

        ``sums`` are those over all parameters, if the rule has :attr:`sums_over_all`.
        :meth:`derived` gets the entries from before the step. An iteration whose step is skipped, as GradScaler does,
        changes nothing.
        """
        return {}

    def for_group(self, group: Group) -> Rule:
        """Return the rule of a group: this one, unless an optimizer holds several. See ``rules/muon.py``."""
        return self

    @property
    def label(self) -> str:
        """The name of the rule in logs and in ``explain()``."""
        return type(self).__name__

    def plan_key(self, group: Group) -> Hashable:
        """Return the hyperparameters that a plan assumes in addition to its variant. Other values make a new plan."""
        return None

    def routes(self, groups: Sequence[Group]) -> Sequence[str]:
        """Return lines for ``explain()`` that say which parameters follow which rule, if there are several."""
        return ()

    def state_names(self, group: Group) -> Sequence[str]:
        """Return the names of states that options of a group may name."""
        return self.row(group, 1).variant.states

    def check_params(self, group: Group, names: Callable[[], Sequence[str]]) -> None:
        """Raise if a parameter of a new group does not suit the rule. ``names`` returns the names of its parameters."""

    def constants(self, group: Group, shape: Sequence[int]) -> Constants:
        """Return numbers that depend on the shape of a parameter, by name. ``derived`` gets them with the group."""
        return ()

    def matrix_map(self, group: Group) -> MatrixMap | None:
        """Return the function behind the argument ``map_matrices`` of ``update``, for rules that take it."""
        return None

    def matrix_cut(self, group: Group, shape: Sequence[int]) -> MatrixCut:
        """Return how a parameter of this shape is cut into matrices; raise ValueError if it cannot be."""
        raise NotImplementedError

    def clips(self, group: Group, dtype: torch.dtype) -> list[Clip]:
        """Return the clips that are applied to the gradients of a group in one dtype, in order."""
        return [Clip(self.max_grad_norm)] if self.max_grad_norm is not None else []

    def initial_states(self, group: Group, names: Iterable[str]) -> dict[str, float | None]:
        """Return the initial values of these states for a group; None for a copy of the parameter."""
        declared = {name: None if name == EMA else self.initial_values.get(name, 0.0) for name in names}
        return {name: None if value is None else _initial(group, value) for name, value in declared.items()}

    @property
    def weight_states(self) -> frozenset[str]:
        """The names of states that hold weights: they start as copies of the parameter."""
        return frozenset(name for name, value in self.initial_values.items() if value is None)

    @property
    def unquantized(self) -> frozenset[str]:
        """The names of states that are never kept in 8 bits."""
        return self.weight_states.union(self.reduced_states)

    def view_rank(self, param: Tensor) -> int:
        """Return the number of dimensions in which ``update`` sees a parameter."""
        if param.ndim < 2:
            return 1
        return 3 if self.matrices else 2 if self.rowwise else 1

    def states_of(self, param: Tensor, names: Sequence[str]) -> tuple[str, ...]:
        """Return those of these states that a parameter has."""
        return self._kept_by_rank(self.view_rank(param), names)

    def _kept_by_rank(self, rank: int, names: Sequence[str]) -> tuple[str, ...]:
        others = self.vector_states if rank == 3 else self.reduced_states.keys()
        return tuple(name for name in names if name not in others)

    def reduced_dims(self, name: str) -> tuple[int, ...]:
        """Return the dimensions in which a state has the size 1."""
        return (self.reduced_states[name],) if name in self.reduced_states else ()

    def initial_numbers(self, group: Group) -> dict[str, float]:
        """Return the initial values of :attr:`numbers` for a group."""
        return {name: _initial(group, value) for name, value in self.numbers.items()}

    @property
    def number_names(self) -> tuple[str, ...]:
        """The names of all numbers in the state of a parameter."""
        return ("step", *self.numbers)

    def own_scalars(self, group: Group, step: int) -> dict[str, float]:
        """Return the hyperparameters of options that every optimizer has, for this step. ``update`` does not get them.

        The average of the weights starts as a copy of them after the first step.
        """
        found = {}
        if self.max_grad_norm_per_parameter is not None:
            found[MAX_NORM] = float(self.max_grad_norm_per_parameter)
        decay = group.get(EMA_DECAY)
        if decay is not None:
            warm = step / (step + WARMUP_STEPS - 1) if group.get("ema_warmup") else 1.0
            found[EMA_DECAY] = min(float(decay), warm) if step > 1 else 0.0
        if self.decouples(group):
            found[SHRINK] = 1 - float(group["lr"]) * float(group["weight_decay"])
        if uses_seed(group):
            found[SEED] = float(step_seed(int(group.get("rounding_seed", 0)), step))
        return found

    def decouples(self, group: Group) -> bool:
        """Return True if weight decay is applied to the parameters of a group before ``update``, which gets none."""
        return bool(group.get(DECOUPLED)) and DECOUPLED not in declaration(type(self).update).keywords

    def row(self, group: Group, step: int) -> Row:
        """Return the hyperparameters of a step, and the variant they select. Numbers have their initial values."""
        states, optional, keywords = declaration(type(self).update)
        own = self.own_scalars(group, step)
        group = {**group, **self.initial_numbers(group)}
        if SHRINK in own:
            group["weight_decay"] = 0.0
        derived = self.derived(group, step)
        known = {DTYPE_EPS: torch.finfo(torch.float32).eps, **by_name(group, derived)}
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
        if EMA_DECAY in own:
            kept = (*kept, EMA)
        clips = bool(self.clips(group, torch.float32))
        chosen = bool(group["maximize"]), clips, tuple(own), bool(group.get("cautious"))
        return Row({**scalars, **own}, Variant(kept, tuple(flags), *chosen))

    def program(self, group: Group, unscales: bool = False, rank: int = 1) -> UpdateProgram:
        """Return the program for parameters of a group that it sees with ``rank`` dimensions.

        With ``unscales`` it unscales gradients in place.
        """
        scalars, variant = self.row(group, 1)
        states = self._kept_by_rank(rank, variant.states)
        return UpdateProgram(
            name=self.label,
            update=type(self).update,
            states=states,
            scalars=tuple(scalars),
            flags=variant.flags,
            scaled=variant.maximize or variant.clips,
            unscales=unscales,
            cautious=variant.cautious,
            weights=tuple(name for name in states if name in self.weight_states),
            reduced=tuple(
                (2 + i, self.reduced_states[name]) for i, name in enumerate(states) if name in self.reduced_states
            ),
        )

    def _undeclared(self, name: str) -> RuleError:
        rule = type(self)
        remedy = (
            "put a hyperparameter into the defaults that the constructor hands to super().__init__(params, defaults), "
            "or return its value from derived(); a state is an argument before the `*`"
        )
        return RuleError(f"{rule.__name__}.update takes {name!r}, but it has no value", definition(rule.update), remedy)


def _initial(group: Group, value: float | str) -> float:
    """Return an initial value, which may be that of a hyperparameter."""
    return float(group[value] if isinstance(value, str) else value)
