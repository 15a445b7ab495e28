"""Step each parameter during backward, as soon as its gradient is complete, and free the gradient.

autograd calls a hook of each parameter after its gradient is accumulated. Parameters are collected until their
gradients take as much memory as the largest parameter, or as one of CALLS equal parts of all of them, and are then
stepped in one call. What is left is stepped at the end of backward. An iteration consists of one such backward and one
``optimizer.step()``, which ends it.

Limit: hooks stay on the parameters as long as the optimizer exists, or until another optimizer takes them over.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from compiled_optim.engine.rule import Group, Rule, all_params
from compiled_optim.torch_private import WeakIdKeyDictionary, at_end_of_backward

Step = Callable[[Collection[Tensor], bool], None]
"""Steps these parameters, which have gradients, and no others. True means the first step of an iteration."""

Names = Callable[[Sequence[Group]], Sequence[str]]
"""Returns the names of all parameters of some groups, for messages."""

CALLS = 32
"""Into how many parts the gradients may be divided. Each call checks all parameters, so its cost grows with them."""

_hooks: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The hook of each parameter. A parameter has at most one: that of the optimizer that was constructed last."""


class BackwardSteps:
    """The parameters of one optimizer that are stepped during backward, and the progress of the current iteration."""

    def __init__(self, rule: Rule, step: Step, names: Names) -> None:
        self._rule, self._name = rule, type(rule).__name__
        self._step, self._names = step, names
        self._groups: Sequence[Group] = ()
        self._params: dict[Tensor, None] = {}
        self._limit = 0
        self._lock = threading.RLock()  # autograd has a thread for each device
        self._is_accumulating = False
        self._is_checked = False
        self.reset()

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
        current = {param: None for param in all_params(groups) if param.requires_grad}
        for param in self._params.keys() - current.keys():
            _hooks.pop(param).remove()  # type: ignore[no-untyped-call]
        own = weakref.ref(self)  # a parameter must not keep its optimizer alive
        for param in current.keys() - self._params.keys():
            if param in _hooks:
                _hooks[param].remove()
            hook = param.register_post_accumulate_grad_hook
            _hooks[param] = hook(lambda param: _collect(own(), param))  # type: ignore[no-untyped-call]
        self._groups, self._params = groups, current
        sizes = [param.nbytes for param in current]
        self._limit = max(*sizes, sum(sizes) // CALLS) if sizes else 0

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
                f"parameters in this iteration, but not {self._first_of(self._params.keys() - self._stepped)}; load a "
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
            self._bytes += param.grad.nbytes
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
            self._step(params, not self._stepped)
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
                if any(param in self._params for param in module.parameters()):
                    raise RuntimeError(
                        f"{self._name} with in_backward=True cannot step the parameters of DistributedDataParallel, "
                        "which averages gradients after the hooks of the parameters; use in_backward=False"
                    )
        self._is_checked = True


def _collect(steps: BackwardSteps | None, param: Tensor) -> None:
    """Pass a parameter to its optimizer, unless that no longer exists."""
    if steps is not None:
        steps.collect(param)
