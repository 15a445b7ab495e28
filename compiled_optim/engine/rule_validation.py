"""Validate user-defined rules, with errors that name the line and the remedy.

A rule with an error may fail inside a compiler, or run and compute something else: a state that is rebound instead of
written to keeps its initial value. Therefore a rule is validated when an optimizer is constructed: its declaration, and
one eager trial of its update on two small tensors, once for each program. With ``compile=False`` there is no trial,
because a debugger would stop in it and ``print`` would print. Rules of this package are not validated but tested.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from compiled_optim.backends import disk_cache
from compiled_optim.engine.rule import DECOUPLED, Group, Rule, declaration
from compiled_optim.engine.sharding import check_supported
from compiled_optim.engine.stored_states import COMPENSATION, MASTER, SCALE
from compiled_optim.engine.tensor_types import PLAIN_TYPES
from compiled_optim.errors import RuleError
from compiled_optim.locations import current_user_line, definition, innermost_user_frame, is_ours, rebinding
from compiled_optim.program import Arguments
from compiled_optim.program_checks import sum_stages
from compiled_optim.torch_private import TorchDispatchMode
from compiled_optim.update_program import EMA, UpdateProgram

BRANCH = "choose by torch.where(condition, a, b); what depends on a hyperparameter alone is a bool from derived()"
NUMBER = "keep it a 0-dim tensor; numbers known before the step are returned by derived()"
PRINT = "print, or step through the rule in a debugger, with compile=False"
TORCH = "compute with torch operations only"

RESERVED = {
    EMA: "the average of the weights has this name",
    MASTER: "the float32 copy of the weights has this name",
    COMPENSATION: "what rounding of the weights has lost has this name",
}
"""The names of what options of all optimizers keep in the state of a parameter, and what each name means."""

VALUE_READERS = {
    "__bool__": ("branches on the value of a tensor", BRANCH),
    **dict.fromkeys(
        ("item", "tolist", "__float__", "__int__", "__index__"), ("converts a tensor to a Python number", NUMBER)
    ),
    **dict.fromkeys(("numpy", "__array__"), ("converts a tensor to NumPy", TORCH)),
    **dict.fromkeys(("__repr__", "__format__"), ("prints a tensor", PRINT)),
}


def check_group(rule: Rule, group: Group, compiled: bool, names: Callable[[], Sequence[str]]) -> None:
    """Raise if the rule or a parameter of a new group cannot be stepped. ``names`` returns those of all parameters."""
    check_rule(rule, group)
    params = group["params"]
    is_plain = PLAIN_TYPES.issuperset(map(type, params))
    if is_plain and is_ours(type(rule)):
        return
    if compiled:
        try_out(rule, rule.program(group))
        if rule.matrices:
            try_out(rule, rule.program(group, rank=3), (3,))
    if not is_plain:
        for name, param in zip(names()[-len(params) :], params, strict=True):
            if param.requires_grad:  # a frozen one is checked when it gets a gradient
                rank = rule.view_rank(param)
                program = rule.program(group, rank=rank if rule.matrices else 1)
                check_supported(type(rule).__name__, name, param, program, rank)


def check_group_options(rule: Rule, group: Group) -> None:
    """Raise if a group has the option ``cautious`` or DECOUPLED, but the rule does not allow it."""
    name = type(rule).__name__
    if group.get("cautious") and not is_ours(type(rule)):
        sum_stages(rule.program(group), 1)  # raises if the update cannot be masked
    if not rule.decouples(group):
        return
    if rule.weight_states:
        raise ValueError(
            f"{name} does not support {DECOUPLED}=True: its state {min(rule.weight_states)!r} holds weights as well, "
            "which would not be changed in the same way; its own weight_decay is not added to the gradient either"
        )
    if not ("weight_decay" in group and "lr" in group):
        raise ValueError(f"{name} does not support {DECOUPLED}=True: it has no weight_decay or no lr")


def check_rule(rule: Rule, group: Group) -> None:
    """Raise RuleError if the signature, the derived values and the group of a user's rule do not match."""
    if is_ours(type(rule)):
        return
    _check_signature(rule)
    _check_numbers(rule, group)
    group = {**group, **rule.initial_numbers(group)}
    first, second = (_derived(rule, group, step) for step in (1, 2))
    name = f"{type(rule).__name__}.derived"
    where = definition(rule.derived)
    for key, value in first.items():
        if not isinstance(value, Real):
            what = f"{name} returns {key}={value!r}, of type {type(value).__name__}"
            raise RuleError(what, where, "return numbers, which become scalars, and bools, which are compiled in")
    if [(key, type(value) is bool) for key, value in first.items()] != [
        (key, type(value) is bool) for key, value in second.items()
    ]:
        remedy = "return the same names in every step; what does not apply yet can be 0.0 or 1.0"
        raise RuleError(f"{name} returns other names in the second step than in the first", where, remedy)
    states, optional, keywords = declaration(type(rule).update)
    inherited = is_ours(rule.derived)  # the formula of a subclass may need fewer values
    taken = {*optional, *keywords, *rule.numbers}
    for key in [key for key in first if key not in taken and not inherited]:
        what = f"{type(rule).__name__}.update does not take {key!r}, which derived() returns"
        raise RuleError(
            what, definition(rule.update), "add it as a keyword-only argument of update, or do not return it"
        )
    for state in sorted(optional):
        if not isinstance(first.get(state), bool):
            what = f"{type(rule).__name__} does not define when it keeps the optional state {state!r}"
            raise RuleError(what, where, f"return a bool of that name from derived(): {{{state!r}: ...}}")
    for number in sorted(rule.numbers.keys() - first.keys()):
        what = f"{type(rule).__name__} never changes the number {number!r}"
        raise RuleError(what, where, f"return its value after the step from derived(): {{{number!r}: ...}}")
    for kept in (*states, *rule.numbers):
        if kept in RESERVED or kept.endswith(SCALE):
            meaning = RESERVED.get(kept, "the scales of a state in 8 bits end like this")
            kind = "state" if kept in states else "number"
            what = f"{type(rule).__name__} uses the name {kept!r} for a {kind}, but {meaning}"
            raise RuleError(what, definition(rule.update), f"rename the {kind}")
    if rule.counts_steps and "step" in states:
        what = f"{type(rule).__name__} uses the name 'step' for a state, but the step count has this name"
        raise RuleError(what, definition(rule.update), "rename the state, or set counts_steps = False")
    rule.row(group, 1)  # raises RuleError if a hyperparameter has no value


def try_out(rule: Rule, program: UpdateProgram, ranks: tuple[int, ...] = ()) -> None:
    """Raise RuleError if a user's update cannot be compiled, or does not update all parameters and states.

    It is tried on tensors with each of these numbers of dimensions; by default, with those of a rule without matrices.
    """
    if not is_ours(type(rule)):
        # a copy of the parameter at the start may stay as it is
        _try_out(replace(program, scaled=False), ranks or ((1, 2) if rule.rowwise else (1,)), rule.weight_states)


def _check_signature(rule: Rule) -> None:
    name = type(rule).__name__
    where = definition(rule.update)
    if not isinstance(inspect.getattr_static(type(rule), "update"), staticmethod):
        remedy = "put @staticmethod above it; hyperparameters come by name, from derived() and the group"
        raise RuleError(f"{name}.update is not a static method", where, remedy)
    remedy = "write update(p, g, states, *, hyperparameters), each by its name"
    parameters = list(inspect.signature(rule.update).parameters.values())
    if len(parameters) < 2 or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters[:2]):
        raise RuleError(f"{name}.update does not take the parameters and the gradients", where, remedy)
    for parameter in parameters[2:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise RuleError(f"{name}.update takes {parameter}, but its signature declares what it needs", where, remedy)
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default not in (parameter.empty, None):
            what = f"the state {parameter.name!r} of {name}.update has the default {parameter.default!r}"
            raise RuleError(what, where, "only None is allowed, for an optional state; see initial_values")


def _check_numbers(rule: Rule, group: Group) -> None:
    """Raise RuleError if the rule keeps numbers without a step count, or an initial value is of no hyperparameter."""
    name, where = type(rule).__name__, definition(rule.update)
    for member, declared in (("initial_values", rule.initial_values), ("numbers", rule.numbers)):
        for key, value in declared.items():
            if isinstance(value, str) and value not in group:
                what = f"{name}.{member} starts {key!r} at {value!r}, but no group has such a hyperparameter"
                raise RuleError(what, where, "name an entry of the defaults, or give the value")
    if rule.numbers and not rule.counts_steps:
        what = f"{name} keeps the numbers {list(rule.numbers)}, but counts no steps"
        raise RuleError(what, where, "set counts_steps = True")


def _derived(rule: Rule, group: Group, step: int) -> Mapping[str, Any]:
    """Return the derived values of a rule; raise RuleError if it asks for a hyperparameter the group lacks."""
    try:
        return rule.derived(group, step)
    except KeyError as error:
        where = innermost_user_frame(traceback.extract_tb(error.__traceback__)) or definition(rule.derived)
        remedy = "put it into the defaults that the constructor hands to super().__init__(params, defaults)"
        what = f"{type(rule).__name__}.derived asks for a hyperparameter {error} that no group has"
        raise RuleError(what, where, remedy) from None


@lru_cache(maxsize=1024)
def _try_out(program: UpdateProgram, ranks: tuple[int, ...], constant: frozenset[str] = frozenset()) -> None:
    # the modes of a trial import Dynamo, which would fail without the directory, and blame the rule
    disk_cache.create_directory()
    for rank in ranks:
        with torch.inference_mode(False), torch.no_grad():
            _Trial(program, rank, constant).run()


class _Trial:
    """One eager run of a program on two tensors of different sizes, and a record of what it reads and writes."""

    def __init__(self, program: UpdateProgram, rank: int, constant: frozenset[str]) -> None:
        self.program = program
        self.constant = constant
        generator = torch.Generator().manual_seed(0)
        names = ["grads", "params", *program.states]
        self.shapes = {
            name: [program.list_shape(i, shape) for shape in ((3,) * rank, (2,) * rank)] for i, name in enumerate(names)
        }

        def example(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu") + 0.5

        self.lists = {name: [example(*shape) for shape in shapes] for name, shapes in self.shapes.items()}
        self.scalars = example(2 * len(program.scalars))
        self.read: dict[int, str] = {}  # the last line that read each memory
        self.written: set[int] = set()
        self.grads = {_memory(grad) for grad in self.lists["grads"]}
        self.memories = {name: [_memory(tensor) for tensor in tensors] for name, tensors in self.lists.items()}

    def run(self) -> None:
        rule = self.program.update.__qualname__
        try:
            with _RefuseValueReads(rule), _RecordAccesses(self, rule):
                self.program(list(self.lists.values()), Arguments(self.scalars))
        except RuleError as error:
            raise RuleError(error.what, self._where(error), error.remedy) from None
        except Exception as error:
            remedy = "see the error above; a rule gets lists of 1-D tensors, or of 2-D tensors too if it is rowwise"
            raise RuleError(f"{rule} fails on two small tensors: {error}", self._where(error), remedy) from error
        for name, tensors in self.lists.items():
            if any(tensor.shape != shape for tensor, shape in zip(tensors, self.shapes[name], strict=True)):
                where = rebinding(self.program.update, name) or definition(self.program.update)
                raise RuleError(
                    f"{rule} changes the shape of {name!r}", where, "a state has the shape of its parameter"
                )
            self._check_written(rule, name)

    def _check_written(self, rule: str, name: str) -> None:
        unwritten = [memory for memory in self.memories[name] if memory not in self.written]
        # a state that is never read may stay unwritten
        if name != "params":
            unwritten = [memory for memory in unwritten if memory in self.read]
        if name == "grads" or name in self.constant or not unwritten:
            return
        update = self.program.update
        where = rebinding(update, name) or self.read.get(unwritten[0]) or definition(update)
        what = (
            "does not change every parameter" if name == "params" else f"reads the state {name!r}, but never changes it"
        )
        argument = next(iter(inspect.signature(update).parameters)) if name == "params" else name
        remedy = f"write to its tensors in place, all of them: {argument} *= ..., {argument}.copy_(...)"
        raise RuleError(f"{rule} {what}", where, remedy)

    def _where(self, error: Exception) -> str:
        return innermost_user_frame(traceback.extract_tb(error.__traceback__)) or definition(self.program.update)


class _RefuseValueReads(TorchFunctionMode):
    """Raises on Python calls that read the value of a tensor; at this level the name of the call is known."""

    def __init__(self, rule: str) -> None:
        super().__init__()
        self.rule = rule

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = VALUE_READERS.get(getattr(func, "__name__", ""))
        if found is not None:
            raise RuleError(f"{self.rule} {found[0]}", "", found[1])
        return func(*args, **(kwargs or {}))


class _RecordAccesses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records reads and writes; raises on operations that read a value or write to a gradient."""

    def __init__(self, trial: _Trial, rule: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trial = trial
        self.rule = rule

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            what = (
                f"{self.rule} reads the value of a tensor as a number, as `value=`, `alpha=` and `weight=` of foreach "
                "operations do"
            )
            raise RuleError(what, "", NUMBER)
        for tensor, writes in _arguments(func, args, kwargs or {}):
            memory = _memory(tensor)
            if writes and memory in self.trial.grads:
                remedy = "compute a new list, g = g + ... and not g += ..., without an in-place operation"
                raise RuleError(f"{self.rule} writes to the gradients, which belong to the user", "", remedy)
            if writes:
                self.trial.written.add(memory)
            else:
                self.trial.read[memory] = current_user_line() or ""
        return func(*args, **(kwargs or {}))


def _arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """Yield each tensor argument of an operation, also in lists, and whether the operation writes to it."""
    for i, spec in enumerate(func._schema.arguments):
        given = args[i] if i < len(args) else kwargs.get(spec.name)
        writes = spec.alias_info is not None and spec.alias_info.is_write
        for tensor in given if isinstance(given, list | tuple) else [given]:
            if isinstance(tensor, Tensor):
                yield tensor, writes


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
