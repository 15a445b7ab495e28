"""Step each parameter during backward, as soon as its gradient is complete, and free the gradient.

autograd calls a hook of each parameter after its gradient is accumulated. Parameters are collected until their
gradients take as much memory as the largest parameter, or as one of CALLS equal parts of all of them, and are then
stepped in one call. What is left is stepped at the end of backward. An iteration consists of one such backward and one
``optimizer.step()``, which ends it.

Limit: hooks stay on the parameters as long as the optimizer exists, or until another optimizer takes them over. So an
optimizer with ``in_backward=True`` must not be part of a reference cycle: an optimizer that is replaced would step its
parameters until the garbage collector runs. The rule of the engine is therefore :func:`rule_of`, and not the optimizer.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from compiled_optim.engine.rule import Group, Rule, all_params
from compiled_optim.torch_private import at_end_of_backward, restore_hooks

Step = Callable[[Collection[Tensor], bool], None]
"""Steps these parameters, which have gradients, and no others. True means the first step of an iteration."""

RuleT = TypeVar("RuleT", bound=Rule)

Names = Callable[[Sequence[Group]], Sequence[str]]
"""Returns the names of all parameters of some groups, for messages."""

CALLS = 32
"""Into how many parts the gradients may be divided. Each call checks all parameters, so its cost grows with them."""

_owners: dict[int, weakref.ref[BackwardSteps]] = {}
"""What steps each parameter that has a hook, by the id of the parameter: that of the optimizer that came last.

The owner keeps its parameters alive, and removes its entries when its optimizer dies. There are no weak references to
parameters: torch.utils.swap_tensors, which ``module.to()`` may use, refuses tensors that have some.
"""


class BackwardSteps:
    """The parameters of one optimizer that are stepped during backward, and the progress of the current iteration."""

    def __init__(self, rule: Rule, step: Step, names: Names) -> None:
        """``step`` is a method of the optimizer, which is not kept alive. ``rule`` must not keep it alive either."""
        self._rule, self._name = rule, type(rule).__name__
        self._step, self._names = weakref.WeakMethod(step), names
        self._groups: Sequence[Group] = ()
        self._params: list[Tensor] = []
        self._handles: dict[int, RemovableHandle] = {}
        """The hooks by the ids of the parameters; none for a parameter that another optimizer has taken over."""
        self._limit = 0
        self._lock = threading.RLock()  # autograd has a thread for each device
        self._is_accumulating = False
        self._is_checked = False
        self.reset()
        optimizer = step.__self__  # type: ignore[attr-defined]
        weakref.finalize(optimizer, self._detach).atexit = False

    def reset(self) -> None:
        """Begin a new iteration."""
        self._pending: dict[Tensor, None] = {}
        self._bytes = 0
        self._stepped: set[Tensor] = set()
        self._is_running = False  # whether a backward has begun and has not ended

    def restart(self, groups: Sequence[Group]) -> None:
        """Begin a new iteration with the groups of a checkpoint. What a failed backward has left is dropped."""
        if self._is_running:
            for param in self._params:
                param.grad = None
        self.reset()
        self.attach(groups)

    def check(self, groups: Sequence[Group]) -> None:
        """Raise if the gradients of a group are clipped by a norm over several of them, or the rule sums over all."""
        for group in groups:
            self._check_not_clipped(group)

    def attach(self, groups: Sequence[Group]) -> None:
        """Step the trainable parameters of these groups from now on, and no others."""
        self.check(groups)
        params = [param for param in all_params(groups) if param.requires_grad]
        self._groups = groups
        sizes = [param.nbytes for param in params]
        self._limit = max(*sizes, sum(sizes) // CALLS) if sizes else 0
        if len(params) == len(self._params) and all(map(is_, params, self._params)):
            return
        kept = {*map(id, params)}
        new = kept - {*map(id, self._params)}
        for param in self._params:
            if id(param) not in kept:
                self._release(param)
        self._params = params
        for param in params:
            if id(param) in new:
                self._take(param)

    def _take(self, param: Tensor) -> None:
        """Register a hook for a parameter; remove that of another optimizer."""
        owner = _owners.get(id(param))
        before = None if owner is None else owner()
        if before is not None:
            before._release(param)
        own = weakref.ref(self)  # a parameter must not keep its optimizer alive
        register = param.register_post_accumulate_grad_hook
        self._handles[id(param)] = register(partial(_collect, own))  # type: ignore[no-untyped-call]
        _owners[id(param)] = own

    def _release(self, param: Tensor) -> None:
        """Remove the hook of a parameter, unless another optimizer has taken it over."""
        handle = self._handles.pop(id(param), None)
        if handle is not None:
            handle.remove()
            del _owners[id(param)]

    def _detach(self) -> None:
        """Remove all hooks, because the optimizer no longer exists. It may have died during backward."""
        for param in self._params:
            self._release(param)
        self.reset()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Keep gradients instead of stepping, in this context."""
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    def end_iteration(self) -> None:
        """Step what is left, and begin a new iteration; raise if there was no backward, or if one did not finish."""
        if self._is_running:
            raise RuntimeError(
                f"backward did not finish: {self._name} has stepped {len(self._stepped)} of {len(self._params)} "
                f"parameters in this iteration, but not {self._first_of({*self._params} - self._stepped)}; load a "
                "checkpoint, or call optimizer.zero_grad() to go on with the next iteration"
            )
        # gradients that were accumulated, of parameters that the last backward did not reach
        rest = {param: None for param in self._params if param.grad is not None and param not in self._stepped}
        if not (rest or self._stepped):
            raise RuntimeError(
                f"{self._name} with in_backward=True steps parameters during backward, but there was no backward since "
                "the last step(); call loss.backward() before step()"
            )
        self._flush(rest)
        for param in rest:
            restore_hooks(param)  # torch.utils.swap_tensors has perhaps moved them to another tensor
        self.reset()

    def collect(self, param: Tensor) -> None:
        """Collect a parameter whose gradient is complete; step the collected ones if they are enough."""
        if self._is_accumulating:
            return
        with self._lock:
            self._check_not_reduced_later()
            if param in self._stepped or param in self._pending:
                raise RuntimeError(
                    f"{self._first_of([param])} gets a second gradient in this iteration, but {self._name} has stepped "
                    "it already; call optimizer.step() after each backward, or run all but the last backward of an "
                    "iteration in `with optimizer.accumulate():`; if checkpointed segments share the parameter, use "
                    "use_reentrant=False"
                )
            if not self._is_running:
                self._is_running = at_end_of_backward(self._finish)
            assert param.grad is not None
            self._pending[param] = None
            # a sparse gradient has no nbytes; the step will refuse it
            self._bytes += (param.grad if param.grad.layout == torch.strided else param).nbytes
            if self._bytes >= self._limit:
                self._flush(self._pending)

    def _finish(self) -> None:
        """Step the rest at the end of backward."""
        with self._lock:
            self._flush(self._pending)
            self._is_running = False

    def _flush(self, params: Collection[Tensor]) -> None:
        """Step parameters and free their gradients."""
        if params:
            self.check(self._groups)  # user code may have set max_grad_norm
            step = self._step()
            assert step is not None  # the optimizer exists: it has been called, or its hooks would be gone
            step(params, not self._stepped)
            for param in params:
                param.grad = None
            self._stepped.update(params)
        self._pending, self._bytes = {}, 0

    def _first_of(self, params: Collection[Tensor]) -> str:
        """Return the names of the first few of these parameters."""
        pairs = zip(all_params(self._groups), self._names(self._groups), strict=True)
        found = [name for param, name in pairs if any(param is other for other in params)]
        return ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")

    def _check_not_clipped(self, group: Group) -> None:
        if self._rule.sums_over_all:
            raise ValueError(
                f"{self._name} does not support in_backward=True: its formula sums over all gradients, but each is "
                "freed before the others exist; use in_backward=False"
            )
        if self._rule.clips(group, torch.float32):
            raise ValueError(
                f"{self._name} with in_backward=True cannot clip by the norm of all gradients, because it frees each "
                "gradient before the others exist; remove max_grad_norm, or clip each parameter by its own norm with "
                "max_grad_norm_per_parameter"
            )

    def _check_not_reduced_later(self) -> None:
        """Raise if DistributedDataParallel has one of the parameters: it averages gradients after these hooks."""
        if self._is_checked:
            return
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            kind = torch.nn.parallel.DistributedDataParallel
            for module in [found for found in gc.get_objects() if isinstance(found, kind)]:
                if not {*self._params}.isdisjoint(module.parameters()):
                    raise RuntimeError(
                        f"{self._name} with in_backward=True cannot step the parameters of DistributedDataParallel, "
                        "which averages gradients after the hooks of the parameters; use in_backward=False"
                    )
        self._is_checked = True


def _collect(owner: weakref.ref[BackwardSteps], param: Tensor) -> None:
    """Pass a parameter to its owner, unless that no longer exists."""
    steps = owner()
    if steps is not None:
        steps.collect(param)


def rule_of(optimizer: RuleT) -> RuleT:
    """Return an object of the same class with the same attributes, now and later, that does not keep it alive."""
    rule = object.__new__(type(optimizer))
    rule.__dict__ = optimizer.__dict__
    return rule
