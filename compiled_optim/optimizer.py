"""The base of all optimizers: a ``torch.optim.Optimizer`` whose step runs compiled units over batches.

A subclass is a constructor and a formula. It says which states it keeps (``state_names``), which numbers the formula
needs (``scalars``), what changes the formula itself (``options``), and what it computes (``update``). Everything else
is here and in the modules this one calls; docs/rules.md builds one.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from compiled_optim import amp, backends, checkpoint, contract, shards, states
from compiled_optim.account import Account
from compiled_optim.advice import advice
from compiled_optim.backends import Backend, Signature, Unit
from compiled_optim.backends.eager import asked_for_eager
from compiled_optim.collect import collect
from compiled_optim.compare import Comparison, comparing
from compiled_optim.errors import BackendUnavailableError, ReallocationError
from compiled_optim.events import Events
from compiled_optim.explain import Explanation
from compiled_optim.guard import same_objects
from compiled_optim.options import TORCH_SWITCHES
from compiled_optim.plan import Plan, compile_units
from compiled_optim.program import UpdateProgram
from compiled_optim.reallocation import Tracker, has_memory, undone_on_error
from compiled_optim.rule import Rule


class Optimizer(Rule, torch.optim.Optimizer):
    """Base class of the optimizers in this package. What a subclass defines is in :class:`~compiled_optim.rule.Rule`.

    Args:
        params: parameters, named parameters or parameter groups, as for torch.optim; or a module, which is watched
            (see :meth:`watch`) and brings the parameters' names.
        defaults: the hyperparameters of groups that do not set their own.
        compile: False runs the very same update eagerly, as does the environment variable ``COMPILED_OPTIM_EAGER=1``.
        backend: a registered backend's name or a Backend; None picks one by each parameter's device.
        on_realloc: what to do when a parameter was reallocated: follow it ("recompile") or raise ReallocationError.
        max_grad_norm: clip gradients to this global norm inside the step; ``p.grad`` itself is left as it is.
        maximize: go up the gradients instead of down; ``defaults`` may set it instead.
    """

    _step_supports_amp_scaling = True
    grad_scale: Tensor | None
    found_inf: Tensor | None
    """Set by torch.amp.GradScaler for the length of a step, and not there else: see ``amp``."""

    unscales = False
    """Whether a GradScaler has ever made a step, so that the programs multiply gradients by its scale's inverse."""

    state_was_seen = False
    """Whether anybody but this package has had the state in hand, and could change it from now on."""

    _plan: Plan | None = None

    last_grad_norm: Tensor | None = None
    """If gradients are clipped, the norm of all gradients of the last step before that, as a 0-dim tensor."""

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
        **switches: bool | None,
    ) -> None:
        unknown = switches.keys() - (TORCH_SWITCHES if self.has_torch_switches else {}).keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} got an unexpected keyword argument {min(unknown)!r}")
        if switches.get("differentiable"):
            raise NotImplementedError(
                "differentiable=True is not supported: a compiled step is not recorded by autograd; use torch.optim"
            )
        if on_realloc not in ("recompile", "raise"):
            raise ValueError(f'Invalid on_realloc value: {on_realloc!r}; use "recompile" or "raise"')
        if max_grad_norm is not None and not max_grad_norm >= 0.0:
            raise ValueError(f"Invalid max_grad_norm value: {max_grad_norm}")
        self.compile = compile and not asked_for_eager()
        self.backend = backends.get(backend) if isinstance(backend, str) else backend
        self.on_realloc = on_realloc
        self.max_grad_norm = max_grad_norm
        self.unscales = False
        self._start()
        defaults = {"maximize": maximize, **defaults}
        if self.has_torch_switches:
            defaults = {**defaults, **TORCH_SWITCHES, **switches}
        self.check(defaults)
        if isinstance(params, torch.nn.Module):
            self.watch(params)
            params = params.named_parameters()
        super().__init__(params, defaults)

    # ---- torch.optim's interface

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of each parameter, as in torch.optim. From the first look at it on, every step checks it."""
        self.state_was_seen = True
        return self.own_state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self.__dict__["state"] = state

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, *args: Any, **kwargs: Any) -> float | None:
        """Make one step; with a closure, call it first with gradients enabled and return its loss."""
        if "grad_scaler" in kwargs:
            return amp.step_unscaled(kwargs["grad_scaler"], self)
        make = self._step
        if torch.compiler.is_compiling():
            make = self._step_out_of_graph
        elif self._is_observed():
            make = self._observed_step
        return make(*args, **kwargs)  # as they came: hooks get to see them

    step.hooked = True  # type: ignore[attr-defined] # see _is_observed

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as in torch.optim; of the parameters the watched modules hold now."""
        if not self._tracker.undisturbed() and self.on_realloc == "recompile":
            with torch.no_grad(), self._following():
                pass
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch.optim; its hyperparameters are checked too."""
        if isinstance(param_group, dict):
            self.check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for device in dict.fromkeys(param.device for param in group["params"]):
                self.backend_for(device)
            program = self.program(group)
            if any(type(param) not in shards.PLAIN for param in group["params"]):
                names = self.parameter_names()[-len(group["params"]) :]
                for name, param in zip(names, group["params"], strict=True):
                    shards.refuse(type(self).__name__, name, param, program, self.rowwise)
        except Exception:
            self.param_groups.pop()
            raise
        self._tracker.see(group["params"])

    def state_dict(self) -> dict[str, Any]:
        """The state as torch.optim's, ``step`` tensors no longer shared: torch would count a shared one many times."""
        saved = super().state_dict()
        if "state" in saved:  # a hook may have returned something else
            saved["state"] = {key: states.unshared(state) for key, state in saved["state"].items()}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer, of torch.optim's or torch_npu's of the same name.

        It belongs to the parameters the watched modules hold now, in their order. Load it after a scheduler was
        constructed, which sets the learning rate. As in torch.optim, hyperparameters are the checkpoint's, a parameter
        it has no state for starts afresh, and tensors that need no conversion are taken over, not copied.

        States are moved to their parameter's device and converted to its dtype, with one difference to torch: a state
        of a float16 or bfloat16 parameter that was saved with more precision stays float32, in which the step computes.

        What does not fit (other sizes or shapes, missing states, another optimizer's) raises ValueError, which names
        the parameter or group, and leaves the optimizer as it was.
        """
        state_dict = copy.copy(state_dict)  # for hooks to change, as in torch
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        # with "raise", the next step tells what has changed
        with self._following() if self.on_realloc == "recompile" else nullcontext():
            self.__setstate__(checkpoint.read(self, state_dict))
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        options = ("compile", "backend", "on_realloc", "max_grad_norm", "last_grad_norm", "unscales")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in options}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.update(self.completed(group))
        if "_tracker" not in self.__dict__:  # else load_state_dict: another state, the same parameters
            self._start()
            self._tracker.see(self._params())
        self._plan = None
        self.state_was_seen = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimizer:
        """Copy parameters and state; a module that was copied before, along with this, is watched in its place."""
        other = memo[id(self)] = type(self).__new__(type(self))
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        other._tracker.take_over(self._tracker, memo)
        return other

    # ---- beyond torch.optim

    def watch(self, module: torch.nn.Module) -> None:
        """Look into a module before every step and notice when it replaces or drops a parameter of this optimizer.

        By default the new object is adopted with fresh state, in the old one's group, and a dropped one is forgotten;
        with ``on_realloc="raise"`` the step raises. Several modules may be watched; a module given as ``params`` is.
        """
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"watch() takes a torch.nn.Module, but got {type(module).__name__}")
        self._tracker.watch(module)

    def warmup(self) -> None:
        """Compile now what the first step will need, without making a step; on a terminal, show how far it is.

        Assumes that every parameter gets a gradient; those that have no memory yet are left out. Units for scaled
        gradients are made once a GradScaler has made a step.
        """
        with torch.no_grad():
            grads = [shards.local(param).detach() if has_memory(param) else None for param in self._params()]
            compile_units(self, collect(self, grads), bar=sys.stderr.isatty())

    def explain(self) -> Explanation:
        """What was compiled, for which devices, how much a step calls, and what the guard saw."""
        devices = dict.fromkeys(param.device for param in self._params())
        in_use = dict.fromkeys(self.backend_for(device) for device in devices)
        batches = self._plan.batches if self._plan is not None else []
        units = self._account.reports()
        odd = advice(self, batches, units)
        return Explanation.of(type(self).__name__, list(in_use), self._plan, units, self._events.told(), odd)

    def compare_eager(self) -> AbstractContextManager[Comparison]:
        """Make the next step, within this context, both ways, and tell how far they come apart in each parameter.

        The compiled step is the one that counts; the eager one is made on copies, which takes their memory meanwhile.

        >>> import compiled_optim as co
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> opt = co.AdamW([weight])
        >>> weight.sum().backward()
        >>> with opt.compare_eager() as comparison:
        ...     opt.step()
        >>> comparison.largest < 1e-6
        True
        """
        return comparing(self)

    # ---- what the plan asks for

    @property
    def own_state(self) -> defaultdict[Tensor, Any]:
        """The state, for use in this package."""
        state: defaultdict[Tensor, Any] = self.__dict__["state"]
        return state

    def parameter_names(self) -> list[str]:
        """How messages name each parameter, in their order."""
        return self._tracker.names(self.param_groups)

    def completed(self, group: dict[str, Any]) -> dict[str, Any]:
        """A saved group with the keys an older checkpoint lacks; a flag it does not know was not set in its time."""
        arguments = inspect.signature(type(self)).parameters.values()
        flags = {argument.name: argument.default for argument in arguments if isinstance(argument.default, bool)}
        return {**self.defaults, **flags, **group}

    def program(self, group: dict[str, Any]) -> UpdateProgram:
        """The program for a group's options; raises RuleError if the rule cannot be one."""
        contract.check_declarations(self, group)
        program = UpdateProgram(
            name=type(self).__name__,
            update=type(self).update,
            states=tuple(self.initial_state(group)),
            scalars=tuple(self.scalars(group, 1)),
            options=tuple(self.options(group).items()),
            scaled=bool(group["maximize"]) or self.unscales or bool(self.clips(group, torch.float32)),
        )
        if self.compile:
            contract.try_out(self, program)
        return program

    def clips_any(self) -> bool:
        """Whether gradients have to be measured before the update."""
        return any(self.clips(group, torch.float32) for group in self.param_groups)

    def variants(self) -> list[object]:
        """What each group's program depends on; compared on every step, so cheaper than the programs."""
        return [
            (self.options(group), self.initial_state(group), group["maximize"], len(self.clips(group, torch.float32)))
            for group in self.param_groups
        ] + [self.unscales]

    def backend_for(self, device: torch.device) -> Backend:
        """The backend that steps parameters on this device; raises if it cannot work here."""
        if not self.compile:
            return backends.get("eager")
        backend = self.backend or backends.for_device(device.type)
        if backend.devices and device.type not in backend.devices:
            raise BackendUnavailableError(
                f"backend {backend.name!r} serves {', '.join(backend.devices)} but a parameter is on {device.type!r}; "
                "leave backend=None to have it chosen by device"
            )
        available = backend.available()
        if not available:
            raise BackendUnavailableError(
                f"{type(self).__name__} cannot be compiled by backend {backend.name!r}: {available.reason}"
            )
        return backend

    def obtain(self, backend: Backend, signature: Signature) -> Unit:
        """The unit for a signature, compiled if need be, and on this optimizer's account."""
        new = backend.compiles_anew(signature)
        unit = backend.unit(signature)
        if backend.compiles:
            self._account.note(signature, unit, new, late=self._stepped)
        return unit

    # ---- inside

    def _step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.is_inference_mode_enabled():  # states made there could never be stepped outside of it
            with torch.inference_mode(False):
                self._update()
        else:
            self._update()
        return loss

    def _update(self) -> None:
        if amp.is_overflow(self):
            return
        if amp.has_scaler(self):
            self.unscales = True
        records = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # all that torch.no_grad() does, without its 3 µs
        try:
            params = self._params()
            grads = self._grads(params)
            if not self._in_place(params, grads):
                self._plan, grads = self._new_plan(params, grads)
            assert self._plan is not None
            self._plan.run(self, grads)
            self._stepped = True
        except BaseException:
            amp.forget_scaler(self)
            raise
        finally:
            torch._C._set_grad_enabled(records)

    _observed_step = torch.optim.Optimizer.profile_hook_step(_step)
    _step_out_of_graph = _disable_dynamo(_observed_step)

    def _is_observed(self) -> bool:
        """Whether a profiler or hooks are to be told of a step; torch's own wrapper, always on, would take 10 µs.

        Torch wraps a subclass's own ``step``, so there they have been told.
        """
        return type(self).step is Optimizer.step and bool(
            torch._C._autograd._profiler_enabled()
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
        )

    def _start(self) -> None:
        self._plan = None
        self._tracker = Tracker()
        self._events = Events(type(self).__name__)
        self._account = Account()
        self._stepped = False

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _in_place(self, params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> bool:
        """Whether the plan still describes the optimizer and everything is where it was."""
        return self._plan is not None and self._tracker.undisturbed() and self._plan.fits(self, params, grads)

    @contextmanager
    def _following(self) -> Iterator[None]:
        """Find out what has changed and follow it, or refuse; undone if what is done in this context fails."""
        moves = self._tracker.find(self.param_groups)
        changes = [move.change for move in moves if move.change is not None]
        if changes and self.on_realloc == "raise":
            raise ReallocationError(changes)
        with undone_on_error(self):
            self._tracker.apply(self, moves)
            yield
        self._tracker.accept(self.param_groups, moves)
        for change in changes:
            self._events.tell(change)

    def _new_plan(self, params: Sequence[Tensor], grads: list[Tensor | None]) -> tuple[Plan, list[Tensor | None]]:
        """A plan for what there is now, and its gradients."""
        with self._following():
            if not same_objects(self._params(), params):
                params = self._params()
                grads = self._grads(params)  # not for nothing: it may be collective
            return Plan(self, collect(self, grads), params, grads), grads

    def _grads(self, params: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients; of split ones what this process holds of them."""
        grads = [param.grad for param in params]
        if shards.any_dtensor(grads):
            return shards.local_grads(params, grads, self.parameter_names)
        return grads


Optimizer.step.__signature__ = inspect.signature(Optimizer._step)  # type: ignore[attr-defined]
