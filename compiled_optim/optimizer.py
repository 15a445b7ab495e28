"""The base class of all optimizers: torch.optim's interface around the engine.

A subclass defines a constructor and a formula; see :class:`~compiled_optim.engine.rule.Rule` and docs/rules.md. This
module implements the interface of torch.optim and passes each step to ``stepper``.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim import backends
from compiled_optim.backends import Backend
from compiled_optim.backends.eager import eager_requested
from compiled_optim.diagnostics.compare import Comparison
from compiled_optim.diagnostics.explain import Explanation
from compiled_optim.engine import amp, checkpoint, states
from compiled_optim.engine.rule import Rule, all_params
from compiled_optim.engine.rule_validation import check_group
from compiled_optim.options import TORCH_SWITCHES, Settings, check_options
from compiled_optim.stepper import Stepper
from compiled_optim.torch_private import (
    disable_dynamo,
    global_post_hooks,
    global_pre_hooks,
    profile_hook_step,
    profiler_enabled,
    set_grad_enabled,
)


def _setting(name: str) -> Any:
    """Return a property that reads and writes an option of the stepper's settings."""
    return property(lambda self: getattr(self._settings, name), lambda self, to: setattr(self._settings, name, to))


def _torch_method(name: str) -> Callable[..., Any]:
    """Return a method of torch.optim, without the wrapper that imports Dynamo unless Dynamo is running."""
    method: Any = getattr(torch.optim.Optimizer, name)
    code = getattr(method, "__code__", None)
    is_wrapper = code is not None and code.co_filename == disable_dynamo.__code__.co_filename
    return method.__wrapped__ if is_wrapper and not torch.compiler.is_compiling() else method  # type: ignore[no-any-return]


class Optimizer(Rule, torch.optim.Optimizer):
    """Base class of the optimizers in this package.

    Args:
        params: parameters, named parameters or parameter groups, as for torch.optim; or a module, which is watched
            (see :meth:`watch`) and gives the parameters their names.
        defaults: the hyperparameters of groups that do not set their own.
        compile: False runs the same update eagerly, as does the environment variable ``COMPILED_OPTIM_EAGER=1``.
        backend: a registered backend's name or a Backend; None chooses one by each parameter's device.
        on_realloc: "recompile" follows a reallocated parameter, "raise" raises ReallocationError.
        max_grad_norm: clip gradients to this global norm inside the step; ``p.grad`` itself is not changed.
        maximize: ascend instead of descend; ``defaults`` may set it instead.
        fused: True makes torch.amp.GradScaler leave unscaling to the step. It has no other effect.
    """

    has_torch_switches: ClassVar[bool] = False
    """Whether torch.optim has an optimizer of this name. If so, its ``foreach``, ``capturable`` ... have no effect."""

    compile = _setting("compile")
    backend = _setting("backend")
    on_realloc = _setting("on_realloc")

    last_grad_norm: Tensor | None = None
    """The norm of all gradients of the last step before clipping, as a 0-dim tensor; None without clipping."""

    _step_supports_amp_scaling = False
    """Whether torch.amp.GradScaler leaves unscaling to the step: True with ``fused=True``, as in torch.optim."""
    grad_scale: Tensor | None
    found_inf: Tensor | None
    """Set by torch.amp.GradScaler during such a step; otherwise absent. See ``engine.amp``."""

    _comparison: Comparison | None = None
    _state_was_accessed = False  # by user code, which may change it at any time afterwards

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        defaults: dict[str, Any],
        *,
        compile: bool = True,
        backend: str | Backend | None = None,
        on_realloc: Literal["recompile", "raise"] = "recompile",
        max_grad_norm: float | None = None,
        maximize: bool = False,
        fused: bool | None = None,
        **switches: bool | None,
    ) -> None:
        check_options(type(self).__name__, self.has_torch_switches, switches, on_realloc, max_grad_norm)
        chosen = backends.get(backend) if isinstance(backend, str) else backend
        self._settings = Settings(compile and not eager_requested(), chosen, on_realloc)
        self._stepper = Stepper(self, self._settings)
        self.max_grad_norm = max_grad_norm
        defaults = {"maximize": maximize, **defaults}
        self._step_supports_amp_scaling = bool(fused)
        if self.has_torch_switches:
            defaults = {**defaults, **TORCH_SWITCHES, "fused": fused, **switches}
        self.check(defaults)
        if isinstance(params, torch.nn.Module):
            self.watch(params)
            params = params.named_parameters()
        super().__init__(params, defaults)

    # ---- torch.optim's interface

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of each parameter, as in torch.optim. After the first access, every step checks the state."""
        self._state_was_accessed = True
        return self._state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self._state_was_accessed = "state" in self.__dict__  # not when torch's constructor sets it
        self.__dict__["state"] = state

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, *args: Any, **kwargs: Any) -> float | None:
        """Make one step. A closure is called first, with gradients enabled; return its loss."""
        if "grad_scaler" in kwargs:  # of torch_npu, which unscales gradients itself
            with amp.without_amp_scaling(self):
                return kwargs["grad_scaler"].step(self)  # type: ignore[no-any-return]
        make_step = self._step
        if torch.compiler.is_compiling():
            make_step = self._step_out_of_graph
        # torch's wrapper takes 10 µs, so it is used only if needed; torch itself wraps a step that a subclass defines
        elif type(self).step is Optimizer.step and (
            profiler_enabled()
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or global_pre_hooks
            or global_post_hooks
        ):
            make_step = self._observed_step
        return make_step(*args, **kwargs)  # unchanged, because hooks get them

    step.hooked = True  # type: ignore[attr-defined] # prevents torch from wrapping it

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients as in torch.optim. Parameters that a watched module has replaced are followed first."""
        if self.on_realloc == "recompile" and not self._stepper.tracker.modules_unchanged():
            with torch.no_grad():
                self._stepper.sync_params(self.param_groups, self._state, lambda: None)
        _torch_method("zero_grad")(self, set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in torch.optim, and check its hyperparameters."""
        if isinstance(param_group, dict):
            self.check({**self.defaults, **param_group})
        _torch_method("add_param_group")(self, param_group)
        group = self.param_groups[-1]
        try:
            self._stepper.check_devices({param.device for param in group["params"]})
            check_group(self, group, self.compile, lambda: self._stepper.tracker.names(self.param_groups))
        except Exception:
            self.param_groups.pop()
            raise
        self._stepper.tracker.add(group["params"])

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch.optim does; each parameter gets a ``step`` tensor of its own."""
        saved: dict[str, Any] = _torch_method("state_dict")(self)
        if "state" in saved:  # a hook may have returned something else
            saved["state"] = states.with_own_steps(saved["state"])
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer, of torch.optim's or of torch_npu's of the same name.

        Works as in torch.optim, with two differences. What does not fit (other sizes or shapes, missing states,
        another optimizer's) raises ValueError, which names the parameter or group, and changes nothing. A state of a
        float16 or bfloat16 parameter that was saved with more precision stays float32, in which the step computes.
        """
        state_dict = copy.copy(state_dict)  # hooks may change it, as in torch
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        stepper, groups = self._stepper, self.param_groups

        def load() -> None:
            self.__setstate__(checkpoint.read(self, groups, stepper.tracker.names(groups), self.defaults, state_dict))

        if self.on_realloc == "recompile":
            stepper.sync_params(groups, self._state, load)
        else:  # the next step reports changes
            load()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        names = ("_settings", "_step_supports_amp_scaling", "max_grad_norm", "last_grad_norm")
        kept = {name: getattr(self, name) for name in names}
        own = {"state": states.with_own_steps(self._state), "_unscales": self._stepper.unscales}
        return {**super().__getstate__(), **kept, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        unscales = state.pop("_unscales", False)
        super().__setstate__(state)
        if not self.has_torch_switches:
            self.defaults.pop("differentiable", None)  # which torch has just added
        for group in self.param_groups:
            group.update(checkpoint.complete_group(self, self.defaults, group))
        if "_stepper" not in self.__dict__:  # not for load_state_dict, which keeps the parameters
            self._stepper = Stepper(self, self._settings, unscales)
            self._stepper.tracker.add(all_params(self.param_groups))
        self._stepper.discard_plan()
        self._state_was_accessed = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimizer:
        """Copy parameters and state. If a watched module is in ``memo``, the new optimizer watches its copy."""
        other = memo[id(self)] = type(self).__new__(type(self))
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        other._stepper.tracker.copy_from(self._stepper.tracker, memo)
        return other

    # ---- beyond torch.optim

    def watch(self, module: torch.nn.Module) -> None:
        """Check a module before every step, to detect that it replaced or removed a parameter of this optimizer.

        By default a new parameter is adopted with fresh state, in the old one's group, and a dropped one is removed;
        with ``on_realloc="raise"`` the step raises. Several modules may be watched.
        """
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"watch() takes a torch.nn.Module, but got {type(module).__name__}")
        self._stepper.tracker.watch(module)

    def warmup(self) -> None:
        """Compile the units of the first step without making a step. On a terminal, show a progress bar.

        This assumes that every parameter gets a gradient. Parameters without memory are skipped. With ``fused=True``,
        units that unscale gradients are compiled in the first step of a GradScaler.
        """
        with torch.no_grad():
            self._stepper.warmup(self.param_groups, self._state, bar=sys.stderr.isatty())

    def explain(self) -> Explanation:
        """Return a report: backends, compiled units, the calls of a step, guard events and advice. Never raises."""
        return self._stepper.explain(self.param_groups, self._state)

    @contextmanager
    def compare_eager(self) -> Iterator[Comparison]:
        """Make the next step in this context compiled and eagerly, and report the differences in each parameter.

        The compiled step updates the parameters. The eager step runs on copies, which take memory during the step.

        >>> import compiled_optim as co
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> opt = co.AdamW([weight])
        >>> weight.sum().backward()
        >>> with opt.compare_eager() as comparison:
        ...     opt.step()
        >>> comparison.largest < 1e-6
        True
        """
        self._comparison = comparison = Comparison(self.compile)
        try:
            yield comparison
        finally:
            self._comparison = None

    # ---- internals

    @property
    def _state(self) -> defaultdict[Tensor, Any]:
        """The state, for use in this package."""
        state: defaultdict[Tensor, Any] = self.__dict__["state"]
        return state

    def _step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.is_inference_mode_enabled():  # states created in it cannot be updated outside of it
            with torch.inference_mode(False):
                self._update()
        else:
            self._update()
        return loss

    _observed_step = profile_hook_step(_step)
    _step_out_of_graph = disable_dynamo(_observed_step)

    def _update(self) -> None:
        stepper, unscale = self._stepper, None
        if "found_inf" in self.__dict__ or "grad_scale" in self.__dict__:
            if amp.is_overflow(getattr(self, "found_inf", None)):
                return
            stepper.unscales = True
        records = torch.is_grad_enabled()
        try:
            set_grad_enabled(False)
            if stepper.unscales:
                unscale = amp.inverse_scale(getattr(self, "grad_scale", None))
            if self._comparison is None:
                self.last_grad_norm = stepper.step(self.param_groups, self._state, self._state_was_accessed, unscale)
            else:
                comparison, self._comparison = self._comparison, None
                self.last_grad_norm = stepper.compared_step(comparison, self.param_groups, self._state, unscale)
            set_grad_enabled(records)
        except BaseException:  # no finally, because an interrupt at its beginning would skip it
            set_grad_enabled(records)
            amp.remove_marks(self.__dict__)
            raise


Optimizer.step.__signature__ = inspect.signature(Optimizer._step)  # type: ignore[attr-defined]
