"""The base class of all optimizers: torch.optim's interface around the engine.

A subclass defines a constructor and a formula; see :class:`~compiled_optim.engine.rule.Rule` and docs/rules.md. This
module implements the interface of torch.optim and passes each step to ``stepper``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from compiled_optim import backends
from compiled_optim.backends import Backend, Layout
from compiled_optim.backends.eager import eager_requested
from compiled_optim.backward import BackwardSteps, rule_of
from compiled_optim.diagnostics.compare import Comparison
from compiled_optim.diagnostics.explain import Explanation
from compiled_optim.engine import amp, averages
from compiled_optim.engine.rows import OWN_OPTIONS
from compiled_optim.engine.rule import DECOUPLED
from compiled_optim.engine.rule_validation import check_group, check_group_options
from compiled_optim.engine.storage_options import KEYS, Rounding, StateDtype
from compiled_optim.options import TORCH_SWITCHES, Settings, check_options
from compiled_optim.saving import MAX_NORMS, SavedOptimizer, torch_method
from compiled_optim.stepper import Stepper
from compiled_optim.torch_private import (
    disable_dynamo,
    global_post_hooks,
    global_pre_hooks,
    profile_hook_step,
    profiler_enabled,
    set_grad_enabled,
)

OPTIONS_OF_GROUPS = OWN_OPTIONS - {DECOUPLED}
"""The keys of groups for options that are there only if somebody sets them."""


class Optimizer(SavedOptimizer):
    """Base class of the optimizers in this package.

    Args:
        params: parameters, named parameters or parameter groups, as for torch.optim; or a module, which is watched
            (see :meth:`watch`) and gives the parameters their names.
        defaults: the hyperparameters of groups that do not set their own.
        compile: False runs the same update eagerly, as does the environment variable ``COMPILED_OPTIM_EAGER=1``.
        backend: a registered backend's name or a Backend; None chooses one by each parameter's device.
        on_realloc: "recompile" follows a reallocated parameter, "raise" raises ReallocationError.
        layout: "flat" moves parameters into flat buffers, "tensors" leaves them where they are; None chooses the
            default of the backend, which is "flat" on NPUs.
        max_grad_norm: clip gradients to this global norm inside the step; ``p.grad`` itself is not changed.
        maximize: ascend instead of descend; ``defaults`` may set it instead.
        fused: True makes torch.amp.GradScaler leave unscaling to the step. It has no other effect.
        in_backward: step each parameter during backward and free its gradient; ``step()`` ends the iteration.
        max_grad_norm_per_parameter: clip each gradient to this norm by itself, inside the step.
        ema_decay: keep a moving average of the weights with this decay, updated in the same pass; see :meth:`ema`.
        ema_warmup: limit the decay in step t to t / (t + 9).
        state_dtype: keep states in torch.float32, torch.bfloat16, torch.float16 or "8bit"; or a dict of these by the
            name of the state. None keeps them in the dtype of the parameter. See docs/storage.md.
        rounding: how bfloat16 and float16 parameters are rounded: "nearest", "stochastic" or "kahan". None rounds
            parameters to nearest, and states with a ``state_dtype`` stochastically.
        master_weights: keep a float32 copy of bfloat16 and float16 parameters, and update that.
        rounding_seed: the seed of stochastic rounding.
        cautious: set elements of the update to zero whose change has the sign of the gradient, and scale up the others
            (Liang et al., 2024, `arXiv:2411.16085 <https://arxiv.org/abs/2411.16085>`_). Weight decay that the rule
            applies to the parameters is not masked.
        decoupled_weight_decay: multiply parameters by ``1 - lr * weight_decay`` before the update, which then has no
            weight decay. Adam, NAdam and RAdam define this option themselves, as in torch.optim.
    """

    _step_supports_amp_scaling = False
    """Whether torch.amp.GradScaler leaves unscaling to the step: True with ``fused=True``, as in torch.optim."""
    grad_scale: Tensor | None
    found_inf: Tensor | None
    """Set by torch.amp.GradScaler during such a step; otherwise absent. See ``engine.amp``."""

    _comparison: Comparison | None = None
    _has_averages_swapped_in = False

    def __init__(
        self,
        params: ParamsT | torch.nn.Module,
        defaults: dict[str, Any],
        *,
        compile: bool = True,
        backend: str | Backend | None = None,
        on_realloc: Literal["recompile", "raise"] = "recompile",
        layout: Layout | None = None,
        max_grad_norm: float | None = None,
        maximize: bool = False,
        fused: bool | None = None,
        in_backward: bool = False,
        max_grad_norm_per_parameter: float | None = None,
        ema_decay: float | None = None,
        ema_warmup: bool = False,
        state_dtype: StateDtype | None = None,
        rounding: Rounding | None = None,
        master_weights: bool = False,
        rounding_seed: int = 0,
        cautious: bool = False,
        decoupled_weight_decay: bool = False,
        **switches: bool | None,
    ) -> None:
        max_norms = dict(zip(MAX_NORMS, (max_grad_norm, max_grad_norm_per_parameter), strict=True))
        name, has_switches = type(self).__name__, self.has_torch_switches
        check_options(name, has_switches, switches, on_realloc, max_norms, layout, in_backward)
        chosen = backends.get(backend) if isinstance(backend, str) else backend
        self._settings = Settings(compile and not eager_requested(), chosen, on_realloc, layout)
        self._start(in_backward=in_backward)
        self.max_grad_norm, self.max_grad_norm_per_parameter = max_grad_norm, max_grad_norm_per_parameter
        defaults = {"maximize": maximize, **defaults}
        if ema_decay is not None:
            defaults["ema_decay"] = ema_decay
        if ema_decay is not None or ema_warmup:  # groups may set their own decay
            defaults["ema_warmup"] = ema_warmup
        stored = dict(zip(KEYS, (state_dtype, rounding, master_weights, rounding_seed), strict=True))
        defaults |= {key: value for key, value in stored.items() if value}
        defaults |= {
            key: True for key, is_set in ((DECOUPLED, decoupled_weight_decay), ("cautious", cautious)) if is_set
        }
        # with in_backward, the scaler has to call the step, which refuses it
        self._step_supports_amp_scaling = bool(fused) or in_backward
        if self.has_torch_switches:
            defaults = {**defaults, **TORCH_SWITCHES, "fused": fused, **switches}
        self.check(defaults)
        if isinstance(params, torch.nn.Module):
            self.watch(params)
            params = self.groups_of(params, defaults)
        super().__init__(params, defaults)

    # ---- torch.optim's interface

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
        self._follow_modules()
        torch_method("zero_grad")(self, set_to_none)
        if self._backward is not None:
            self._backward.reset()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in torch.optim, and check its hyperparameters."""
        if isinstance(param_group, dict):
            self.check({**self.defaults, **param_group})
        torch_method("add_param_group")(self, param_group)
        group = self.param_groups[-1]
        rule, count = self.for_group(group), len(group["params"])
        try:
            rule.check_params(group, lambda: self._stepper.tracker.names(self.param_groups)[-count:])
            has_options = not OPTIONS_OF_GROUPS.isdisjoint(group)
            if has_options:
                self._stepper.check_storage(group)
                averages.check_average(group)
            if has_options or group.get(DECOUPLED):
                check_group_options(rule, group)
            self._stepper.check_devices({param.device for param in group["params"]})
            check_group(rule, group, self.compile, lambda: self._stepper.tracker.names(self.param_groups))
            if self._backward is not None:
                self._backward.check([group])
        except Exception:
            self.param_groups.pop()
            raise
        if has_options and averages.needs_step_counts(group):
            self.counts_steps = True
        self._stepper.tracker.add(group["params"])
        if self._backward is not None:
            self._backward.attach(self.param_groups)

    # ---- beyond torch.optim

    def groups_of(self, module: torch.nn.Module, defaults: Mapping[str, Any]) -> ParamsT:
        """Return what is optimized of a module that was passed as ``params``."""
        return module.named_parameters()

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a context in which backward keeps gradients, for gradient accumulation with ``in_backward=True``.

        Without ``in_backward`` backward keeps gradients anyway.
        """
        return nullcontext() if self._backward is None else self._backward.accumulate()

    @contextmanager
    def ema(self) -> Iterator[None]:
        """Use the averaged weights (``ema_decay``) in this context, for example to evaluate or to save the model.

        The averages are written into the parameters, and the weights are restored at the end, also after an exception.
        """
        self._follow_modules()
        with averages.swapped_in(self.param_groups, self._state):
            before, self._has_averages_swapped_in = self._has_averages_swapped_in, True
            try:
                yield
            finally:
                self._has_averages_swapped_in = before

    def ema_state_dict(self) -> dict[str, Tensor]:
        """Return copies of the averaged weights by name, as ``model.load_state_dict`` takes them."""
        self._follow_modules()
        return averages.averages_by_name(self.param_groups, self._state)

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
        if self._backward is not None:
            raise RuntimeError(
                f"{type(self).__name__}.compare_eager() compares steps of all parameters, but with in_backward=True "
                "backward steps a few at a time; compare with in_backward=False, which gives the same results"
            )
        self._comparison = comparison = Comparison(self.compile)
        try:
            yield comparison
        finally:
            self._comparison = None

    # ---- internals

    def _start(self, unscales: bool = False, in_backward: bool = False) -> None:
        rule = rule_of(self) if in_backward else self
        self._stepper = Stepper(rule, self._settings, unscales)
        if in_backward:
            self._backward = BackwardSteps(rule, self._update, self._stepper.tracker.names)

    def _step(self, closure: Callable[[], float] | None = None) -> float | None:
        try:
            self._check_weights_in_place()
            self.before_step(self.param_groups)
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if self._backward is not None:
                self._end_iteration(self._backward)
            elif torch.is_inference_mode_enabled():  # states created in it cannot be updated outside of it
                with torch.inference_mode(False):
                    self._update()
            else:
                self._update()
        except BaseException:
            amp.remove_marks(self.__dict__)
            raise
        return loss

    _observed_step = profile_hook_step(_step)
    _step_out_of_graph = disable_dynamo(_observed_step)

    def _check_weights_in_place(self) -> None:
        """Raise if the parameters hold averages, which a step would train."""
        if self._has_averages_swapped_in:
            raise RuntimeError(
                "step() inside ema() would train the averaged weights; leave the context first, also before backward "
                "if in_backward=True"
            )

    def _follow_modules(self) -> None:
        """Follow parameters that a watched module has replaced, unless a step has to report them."""
        if self.on_realloc == "recompile" and not self._stepper.tracker.modules_unchanged():
            with torch.no_grad():
                self._stepper.sync_params(self.param_groups, self._state, lambda: None)

    def _end_iteration(self, steps: BackwardSteps) -> None:
        """End an iteration in which backward has stepped the parameters."""
        if "found_inf" in self.__dict__:
            raise RuntimeError(
                f"{type(self).__name__} with in_backward=True does not support GradScaler: parameters are stepped "
                "before all gradients are known to be finite; use bfloat16 without a scaler, or in_backward=False"
            )
        self._follow_modules()
        steps.attach(self.param_groups)
        steps.end_iteration()
        self._stepper.advance(self.param_groups)

    def _update(self, only: Collection[Tensor] | None = None, is_first: bool = True) -> None:
        stepper, unscale, found_inf = self._stepper, None, None
        self._check_weights_in_place()  # again, for steps during backward and closures that enter ema()
        if only is not None:
            self.before_step(self.param_groups)
        if "found_inf" in self.__dict__ or "grad_scale" in self.__dict__:
            stepper.start_unscaling()
            found_inf = getattr(self, "found_inf", None)
            if self._comparison is not None or not stepper.skips_on_device(self.param_groups):
                if amp.is_overflow(found_inf):
                    return
                found_inf = None
        records = torch.is_grad_enabled()
        try:
            set_grad_enabled(False)
            if stepper.unscales:
                unscale = amp.inverse_scale(getattr(self, "grad_scale", None))
            if self._comparison is None:
                self.last_grad_norm = stepper.step(
                    self.param_groups, self._state, self._state_was_accessed, unscale, found_inf, only, is_first
                )
            else:
                comparison, self._comparison = self._comparison, None
                self.last_grad_norm = stepper.compared_step(comparison, self.param_groups, self._state, unscale)
            set_grad_enabled(records)
        except BaseException:  # no finally, because an interrupt at its beginning would skip it
            set_grad_enabled(records)
            raise


Optimizer.step.__signature__ = inspect.signature(Optimizer._step)  # type: ignore[attr-defined]
