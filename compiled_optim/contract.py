"""What a rule promises, and errors that name the line and the remedy where it does not keep it.

A rule that breaks its promises fails deep inside a compiler or, worse, runs and computes something else: a state that
is rebound instead of written to keeps its first value for ever. So a rule is looked at when an optimizer is
constructed: the names it declares, and one trial of its update, eagerly, on two made-up tensors of a few elements, once
for each program. With ``compile=False`` there is no trial: a debugger would stop in it, and ``print`` may print. The
optimizers of this package are tested instead. What only the tracer sees (``print("text")``) is told by
:func:`untraceable` when the rule is compiled.
"""

from __future__ import annotations

import dis
import inspect
import linecache
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_optim.errors import RuleError
from compiled_optim.program import UpdateProgram

if TYPE_CHECKING:
    from compiled_optim.optimizer import Optimizer

PACKAGE = __name__.partition(".")[0]
NOT_A_RULES_FILE = tuple(str(Path(file).parent) for file in (__file__, torch.__file__))

TOTAL = "total"
"""What a program gives to rules that ask for it: adds up sums over shards."""

BRANCH = "choose by torch.where(condition, a, b); what depends on a hyperparameter alone is a bool from options()"
NUMBER = (
    "keep it a 0-dim tensor, which torch._foreach_mul(tensors, scalar) takes; numbers known beforehand are scalars()"
)
PRINT = "print, or step through the rule in a debugger, with compile=False"
TORCH = "compute with torch operations only"

VALUE_READERS = {
    "__bool__": ("branches on the value of a tensor", BRANCH),
    **dict.fromkeys(
        ("item", "tolist", "__float__", "__int__", "__index__"), ("makes a tensor a Python number", NUMBER)
    ),
    **dict.fromkeys(("numpy", "__array__"), ("hands a tensor to NumPy", TORCH)),
    **dict.fromkeys(("__repr__", "__format__"), ("prints a tensor", PRINT)),
}


def is_ours(thing: Any) -> bool:
    """Whether a class or function is defined in this package."""
    return str(thing.__module__).partition(".")[0] == PACKAGE


def check_declarations(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Raise RuleError if the names and values a rule declares do not suit its ``update``."""
    rule = type(optimizer)
    if is_ours(rule):
        return
    if not isinstance(inspect.getattr_static(rule, "update"), staticmethod):
        remedy = "put @staticmethod above it; what it needs of the optimizer comes by name from scalars() and options()"
        raise RuleError(f"{rule.__name__}.update is not a static method", _definition(rule.update), remedy)
    states = _declared(optimizer.initial_state, group)
    options = _declared(optimizer.options, group)
    scalars = _declared(optimizer.scalars, group, 1)
    for name, value in states.items():
        if not isinstance(value, Real):
            remedy = "give the number it is filled with at first; a state has the shape of its parameter, always"
            raise _wrong(optimizer.initial_state, name, value, remedy)
    for name, value in options.items():
        if not isinstance(value, bool):
            remedy = "it would be compiled in, and every other value compiled anew: return numbers from scalars()"
            raise _wrong(optimizer.options, name, value, remedy)
    for name, value in scalars.items():
        if not isinstance(value, Real):
            raise _wrong(optimizer.scalars, name, value, "make it a number: float(...)")
    if list(scalars) != list(_declared(optimizer.scalars, group, 2)):
        remedy = "return the same names in every step; what does not apply yet can be 0.0 or 1.0"
        message = f"{rule.__name__}.scalars gives other names in the second step than in the first"
        raise RuleError(message, _definition(optimizer.scalars), remedy)
    given = [*states, *options, *scalars]
    twice = sorted({name for name in given if given.count(name) > 1} | {"step", "params", "grads"} & {*states})
    twice += [TOTAL] * (TOTAL in given)
    if twice:
        message = f"{rule.__name__} uses the name {twice[0]!r} for two things"
        raise RuleError(
            message, _definition(rule.update), "states, scalars and options share one namespace: rename one"
        )
    _check_arguments(rule, given)


def try_out(optimizer: Optimizer, program: UpdateProgram) -> None:
    """Raise RuleError if the update does what cannot be compiled, or leaves undone what it is for."""
    if not is_ours(type(optimizer)):
        _try_out(replace(program, scaled=False), (1, 2) if optimizer.rowwise else (1,))


def untraceable(program: object, error: Exception) -> RuleError:
    """The error for an update that the tracer gave up on."""
    stack: Sequence[traceback.FrameSummary] = getattr(error, "real_stack", None) or ()
    update = getattr(program, "update", type(program))
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    remedy = f"{TORCH}, on the lists it is given; to look at values, {PRINT}"
    where = _innermost(stack) or _definition(update)
    return RuleError(f"{update.__qualname__} cannot be compiled as one graph ({reason})", where, remedy)


@lru_cache(maxsize=1024)
def _try_out(program: UpdateProgram, ranks: tuple[int, ...]) -> None:
    for rank in ranks:
        with torch.inference_mode(False), torch.no_grad():
            _Trial(program, rank).run()


class _Trial:
    """One eager run of a program on two tensors of different sizes, and what it did to which of them."""

    def __init__(self, program: UpdateProgram, rank: int) -> None:
        self.program = program
        generator = torch.Generator().manual_seed(0)
        shapes = [(3,) * rank, (2,) * rank]
        names = ["grads", "params", *program.states]
        self.lists = {
            name: [torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu") + 0.5 for shape in shapes]
            for name in names
        }
        self.shapes = shapes
        self.shared = torch.rand(len(program.scalars), generator=generator, dtype=torch.float32, device="cpu") + 0.5
        self.read: dict[int, str] = {}  # where it was last
        self.written: set[int] = set()
        self.grads = {_memory(grad) for grad in self.lists["grads"]}
        self.memories = {name: [_memory(tensor) for tensor in tensors] for name, tensors in self.lists.items()}

    def run(self) -> None:
        rule = self.program.update.__qualname__
        try:
            with _ReadsNoValues(rule), _Notes(self, rule):
                self.program(list(self.lists.values()), [self.shared])
        except RuleError as error:
            raise RuleError(error.what, self._where(error), error.remedy) from None
        except Exception as error:
            remedy = "see the error above; a rule gets lists of tensors, any number of them, of one dimension"
            raise RuleError(f"{rule} fails on two small tensors: {error}", self._where(error), remedy) from error
        for name, tensors in self.lists.items():
            if any(tensor.shape != shape for tensor, shape in zip(tensors, self.shapes, strict=True)):
                where = _rebinding(self.program.update, name) or _definition(self.program.update)
                raise RuleError(
                    f"{rule} changes the shape of {name!r}", where, "a state has the shape of its parameter"
                )
            self._check_written(rule, name)

    def _check_written(self, rule: str, name: str) -> None:
        unwritten = [memory for memory in self.memories[name] if memory not in self.written]
        # a state that is not even read does no harm
        if name != "params":
            unwritten = [memory for memory in unwritten if memory in self.read]
        if name == "grads" or not unwritten:
            return
        where = _rebinding(self.program.update, name) or self.read.get(unwritten[0]) or _definition(self.program.update)
        what = (
            "does not change every parameter" if name == "params" else f"reads the state {name!r}, but never changes it"
        )
        remedy = (
            f"write to its tensors in place, all of them: torch._foreach_mul_({name}, ...), _foreach_copy_({name}, ...)"
        )
        raise RuleError(f"{rule} {what}", where, remedy)

    def _where(self, error: Exception) -> str:
        return _innermost(traceback.extract_tb(error.__traceback__)) or _definition(self.program.update)


class _ReadsNoValues(TorchFunctionMode):
    """Refuses what needs a tensor's value in Python, where it is clear from the call what was meant."""

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


class _Notes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is read and written, and refuses operations that read a value or write to a gradient."""

    def __init__(self, trial: _Trial, rule: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trial = trial
        self.rule = rule

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            what = (
                f"{self.rule} reads the value of a tensor as a number (`value=` and `alpha=` of foreach operations do)"
            )
            raise RuleError(what, "", NUMBER)
        for tensor, writes in _arguments(func, args, kwargs or {}):
            memory = _memory(tensor)
            if writes and memory in self.trial.grads:
                remedy = "compute a new list: grads = torch._foreach_add(grads, ...), without the last underscore"
                raise RuleError(f"{self.rule} writes to the gradients, which belong to the user", "", remedy)
            if writes:
                self.trial.written.add(memory)
            else:
                self.trial.read[memory] = _current_line() or ""
        return func(*args, **(kwargs or {}))


def _arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """The tensors an operation is given, in lists too, and whether it writes to each."""
    for i, spec in enumerate(func._schema.arguments):
        given = args[i] if i < len(args) else kwargs.get(spec.name)
        writes = spec.alias_info is not None and spec.alias_info.is_write
        for tensor in given if isinstance(given, list | tuple) else [given]:
            if isinstance(tensor, Tensor):
                yield tensor, writes


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _declared(method: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What a rule's method returns."""
    try:
        return method(*arguments)
    except KeyError as error:
        where = _innermost(traceback.extract_tb(error.__traceback__)) or _definition(method)
        remedy = "put it into the defaults that the constructor hands to super().__init__(params, defaults)"
        raise RuleError(f"{_name(method)} asks for a hyperparameter {error} that no group has", where, remedy) from None


def _check_arguments(rule: type[Optimizer], given: Sequence[str]) -> None:
    """Whether ``update`` takes what it will be given."""
    # the first two are params and grads, by position
    takes = list(inspect.signature(rule.update).parameters.values())[2:]
    known = {*given, TOTAL}
    missing = [p.name for p in takes if p.default is p.empty and p.name not in known and p.kind is not p.VAR_KEYWORD]
    where = _definition(rule.update)
    if missing:
        remedy = "a state is named in state_names or initial_state(), a number in scalars(), a bool in options()"
        raise RuleError(f"{rule.__name__}.update needs {missing[0]!r}, which nothing gives it", where, remedy)
    extra = [name for name in given if name not in {p.name for p in takes}]
    if extra and all(p.kind is not p.VAR_KEYWORD for p in takes):
        remedy = "add it as a keyword argument of update, or do not declare it"
        raise RuleError(f"{rule.__name__}.update does not take {extra[0]!r}, which is declared", where, remedy)


def _wrong(method: Callable[..., Any], name: str, value: object, remedy: str) -> RuleError:
    what = f"{_name(method)} gives {name}={value!r}, of type {type(value).__name__}"
    return RuleError(what, _definition(method), remedy)


def _name(method: Callable[..., Any]) -> str:
    return ".".join(method.__qualname__.split(".")[-2:])


def _definition(function: Callable[..., Any]) -> str:
    """Where a function is defined."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return _place(code.co_filename, code.co_firstlineno, code.co_name) if code is not None else repr(function)


def _innermost(stack: Sequence[traceback.FrameSummary]) -> str | None:
    """The deepest frame that is neither torch's nor this package's."""
    users = [frame for frame in stack if not frame.filename.startswith(NOT_A_RULES_FILE)]
    return _place(users[-1].filename, users[-1].lineno or 0, users[-1].name) if users else None


def _current_line() -> str | None:
    """The line of the rule that is being run."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(NOT_A_RULES_FILE):
        frame = frame.f_back
    return _place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame is not None else None


def _rebinding(update: Callable[..., Any], name: str) -> str | None:
    """Where an argument's name is bound to something else, if it is."""
    code = inspect.unwrap(update).__code__
    for instruction in dis.get_instructions(code):
        line = instruction.positions.lineno if instruction.positions is not None else None
        if instruction.opname == "STORE_FAST" and instruction.argval == name and line is not None:
            return _place(code.co_filename, line, code.co_name)
    return None


def _place(file: str, line: int, function: str) -> str:
    source = linecache.getline(file, line).strip()
    return f"{file}:{line}, in {function}" + (f": {source}" if source else "")
