"""Save and load optimizers: ``state_dict``, ``load_state_dict``, pickle and deepcopy, as in torch.optim."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from compiled_optim.backward import BackwardSteps
from compiled_optim.engine import checkpoint
from compiled_optim.engine.averages import needs_step_counts
from compiled_optim.engine.rows import OWN_OPTIONS
from compiled_optim.engine.rule import Rule, all_params, declaration
from compiled_optim.engine.states import with_own_memory
from compiled_optim.engine.stored_states import has_quantized, in_full_precision
from compiled_optim.engine.tensor_types import is_dtensor
from compiled_optim.options import Settings
from compiled_optim.stepper import Stepper
from compiled_optim.torch_private import disable_dynamo

MAX_NORMS = ("max_grad_norm", "max_grad_norm_per_parameter")


def _setting(name: str) -> Any:
    """Return a property that reads and writes an option of the stepper's settings."""
    return property(lambda self: getattr(self._settings, name), lambda self, to: setattr(self._settings, name, to))


def torch_method(name: str) -> Callable[..., Any]:
    """Return a method of torch.optim, without the wrapper that imports Dynamo unless Dynamo is running."""
    method: Any = getattr(torch.optim.Optimizer, name)
    code = getattr(method, "__code__", None)
    is_wrapper = code is not None and code.co_filename == disable_dynamo.__code__.co_filename
    return method.__wrapped__ if is_wrapper and not torch.compiler.is_compiling() else method  # type: ignore[no-any-return]


class SavedOptimizer(Rule, torch.optim.Optimizer):
    """The state of an optimizer, and how it is saved, loaded and copied."""

    has_torch_switches: ClassVar[bool] = False
    """Whether torch.optim has an optimizer of this name. If so, its ``foreach``, ``capturable`` ... have no effect."""

    own_options: ClassVar[frozenset[str]] = OWN_OPTIONS | {"ema_warmup"}
    """The keys of groups that other optimizers of this name do not have. A checkpoint without them changes none."""

    compile = _setting("compile")
    backend = _setting("backend")
    on_realloc = _setting("on_realloc")
    layout = _setting("layout")

    last_grad_norm: Tensor | None = None
    """The norm of all gradients of the last step before clipping, as a 0-dim tensor; None without clipping."""

    _settings: Settings
    _stepper: Stepper
    _backward: BackwardSteps | None = None
    _step_supports_amp_scaling: bool
    _state_was_accessed = False  # by user code, which may change it at any time afterwards

    @abstractmethod
    def _start(self, unscales: bool, in_backward: bool) -> None:
        """Make the objects that step the parameters: ``_stepper`` and, with ``in_backward``, ``_backward``."""

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of each parameter, as in torch.optim. After the first access, every step checks the state."""
        self._state_was_accessed = True
        return self._state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self._state_was_accessed = "state" in self.__dict__  # not when torch's constructor sets it
        if self._state_was_accessed:
            self._stepper.confirm_last_step(self.__dict__["state"])
        self.__dict__["state"] = state

    @property
    def _state(self) -> defaultdict[Tensor, Any]:
        """The state, for use in this package. The last step is confirmed first."""
        state: defaultdict[Tensor, Any] = self.__dict__["state"]
        if self._stepper.unconfirmed is not None:
            self._stepper.confirm_last_step(state)
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch.optim does; each parameter gets ``step`` and other numbers of its own."""
        saved: dict[str, Any] = torch_method("state_dict")(self)
        if "state" in saved:  # a hook may have returned something else
            saved["state"] = with_own_memory(saved["state"], self.number_names)
            self._widen(saved["state"], only_sharded=True)
        return saved

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state as torch.optim keeps it: in float32 what ``state_dtype="8bit"`` keeps in bytes.

        Master weights and compensations are left out. Options of this package stay in the groups, where torch.optim
        ignores them.
        """
        saved = self.state_dict()
        self._widen(saved["state"], only_sharded=False)
        return saved

    def _widen(self, state: dict[Any, Any], only_sharded: bool) -> None:
        """Replace quantised states by float tensors: for checkpoints of shards, which have blocks of their own."""
        for index, param in enumerate(all_params(self.param_groups)):
            values = state.get(index)
            if isinstance(values, dict) and (not only_sharded or (is_dtensor(param) and has_quantized(values))):
                rows = self.view_rank(param) - 1
                state[index] = in_full_precision(values, self.nonnegative, rows, param, keep_companions=only_sharded)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer, of torch.optim's or of torch_npu's of the same name.

        Works as in torch.optim, with these differences. What does not fit (other sizes or shapes, missing states,
        another optimizer's) raises ValueError, which names the parameter or group, and changes nothing. A state of a
        float16 or bfloat16 parameter that was saved with more precision stays float32, in which the step computes.
        Options of this package that a group of the checkpoint lacks, such as ``cautious``, stay as they are.
        """
        state_dict = copy.copy(state_dict)  # hooks may change it, as in torch
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        stepper, groups, state = self._stepper, self.param_groups, self._state

        def load() -> None:
            loaded = checkpoint.read(self, groups, stepper.tracker.names(groups), self.defaults, state_dict)
            for group, own in zip(loaded["param_groups"], groups, strict=True):
                # without those that a formula itself takes, as Adam's does, which are torch.optim's
                for key in self.own_options & own.keys() - {*declaration(type(self.for_group(own)).update).keywords}:
                    group.setdefault(key, own[key])
            if self._backward is not None:
                whole = [checkpoint.complete_group(self, self.defaults, group) for group in loaded["param_groups"]]
                self._backward.check(whole)
            self.__setstate__(loaded)

        if self.on_realloc == "recompile":
            stepper.sync_params(groups, state, load)
        else:  # the next step reports changes
            load()
        if self._backward is not None:
            self._backward.restart(self.param_groups)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        names = ("_settings", "_step_supports_amp_scaling", *MAX_NORMS, "last_grad_norm")
        kept = {name: getattr(self, name) for name in names}
        own = {"state": with_own_memory(self._state, self.number_names), "_unscales": self._stepper.unscales}
        own["_in_backward"] = self._backward is not None
        return {**super().__getstate__(), **kept, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        unscales, in_backward = state.pop("_unscales", False), state.pop("_in_backward", False)
        super().__setstate__(state)
        if not self.has_torch_switches:
            self.defaults.pop("differentiable", None)  # which torch has just added
        for group in self.param_groups:
            group.update(checkpoint.complete_group(self, self.defaults, group))
        if any(map(needs_step_counts, self.param_groups)):
            self.counts_steps = True
        else:
            self.__dict__.pop("counts_steps", None)
        if "_stepper" not in self.__dict__:  # not for load_state_dict, which keeps the parameters
            self._start(unscales, in_backward)
            self._stepper.tracker.add(all_params(self.param_groups))
            if self._backward is not None:
                self._backward.attach(self.param_groups)
        self._stepper.discard_plan()
        self._state_was_accessed = True

    def __deepcopy__(self, memo: dict[int, Any]) -> SavedOptimizer:
        """Copy parameters and state. If a watched module is in ``memo``, the new optimizer watches its copy."""
        other = memo[id(self)] = type(self).__new__(type(self))
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        other._stepper.tracker.copy_from(self._stepper.tracker, memo)
        return other
