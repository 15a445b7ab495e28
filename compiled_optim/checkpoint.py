"""Reading a checkpoint: all of it is checked before anything is changed, and no state is rounded below the step.

Torch loads what has the right number of parameters, and fails in a later step, or goes on with fresh states, if the
rest does not fit. Here the error comes at once and names the parameter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from compiled_optim.program import compute_dtype
from compiled_optim.states import check_fit

if TYPE_CHECKING:
    from compiled_optim.optimizer import Optimizer

Group = dict[str, Any]

REMEDY = "load the checkpoint that belongs to this optimizer and model"


OTHERS_KEYS = {
    *("params", "param_names"),
    *("base_momentum", "initial_lr", "max_lr", "max_momentum", "min_lr", "swa_lr"),  # of schedulers
}
"""What a group has that is no hyperparameter."""


def read(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The state and groups of a checkpoint, for this optimizer's parameters; ValueError if they do not fit them."""
    name = type(optimizer).__name__
    if not (
        isinstance(saved, Mapping)
        and isinstance(saved.get("state"), Mapping)
        and isinstance(saved.get("param_groups"), list | tuple)
    ):
        found = f"a dict with {sorted(map(str, saved))}" if isinstance(saved, Mapping) else type(saved).__name__
        raise ValueError(f"{found} is no optimizer's checkpoint; pass what state_dict() of {name} returned")
    _check_sizes(optimizer.param_groups, saved["param_groups"])
    kept = [_states(optimizer, number, group) for number, group in enumerate(saved["param_groups"])]
    groups: list[Group] = deepcopy(list(saved["param_groups"]))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    keys = [(key, states) for group, states in zip(groups, kept, strict=True) for key in group["params"]]
    names = optimizer.parameter_names()
    owners = {key: (param, of, states) for (key, states), param, of in zip(keys, params, names, strict=True)}
    state: defaultdict[Any, Any] = defaultdict(dict)
    for key, values in saved["state"].items():
        if key in owners:
            param, of, states = owners[key]
            values = {} if values is None else values
            _check(optimizer, of, param, values, states)
            state[param] = _fitted(param, values)
        elif isinstance(values, Mapping) and any(isinstance(value, Tensor) for value in values.values()):
            raise ValueError(f"the checkpoint has a state for {key!r}, but no group of it lists such a parameter")
        else:
            state[key] = values  # not any parameter's: the user's own, as in torch
    for group, own in zip(groups, optimizer.param_groups, strict=True):
        group["params"] = own["params"]
        if "param_names" in own:
            group.setdefault("param_names", own["param_names"])
    return {"state": state, "param_groups": groups}


def _check_sizes(own: Sequence[Group], saved: Sequence[Group]) -> None:
    """Raise unless the groups hold as many parameters; the messages begin with torch's words."""
    for group in saved:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list | tuple):
            raise ValueError(f"a parameter group of the checkpoint is no dict with 'params'; {REMEDY}")
    if len(own) != len(saved):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: {len(saved)}, but the optimizer has "
            f"{len(own)}; {REMEDY}"
        )
    for number, (old, group) in enumerate(zip(own, saved, strict=True)):
        here, there = len(old["params"]), len(group["params"])
        if here != there:
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: group "
                f"{number} has {there} parameters there and {here} here; {REMEDY}"
            )


def _states(optimizer: Optimizer, number: int, group: Group) -> Sequence[str]:
    """Which states a group's parameters have; raises if a step could not use its hyperparameters."""
    numbers = {key for key, value in optimizer.defaults.items() if not isinstance(value, bool | None)}
    missing, unknown = numbers - group.keys(), group.keys() - optimizer.defaults.keys() - OTHERS_KEYS
    if missing and unknown:
        raise ValueError(
            f"group {number} of the checkpoint is of another optimizer than {type(optimizer).__name__}: it has "
            f"{sorted(unknown)}, but no {sorted(missing)}; {REMEDY}"
        )
    try:
        return optimizer.program(optimizer.completed(group)).states
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"group {number} of the checkpoint has a hyperparameter that is of no use: {error}") from error


def _check(optimizer: Optimizer, name: str, param: Tensor, values: Any, states: Sequence[str]) -> None:
    """Raise unless a parameter could be stepped with these states; none at all are those of one never stepped."""
    if not isinstance(values, dict):
        raise ValueError(f"the state of {name} is {type(values).__name__}, not a dict; {REMEDY}")
    if all(value is None for value in values.values()):
        return
    missing = [state for state in states if values.get(state) is None]
    if optimizer.counts_steps and "step" not in values:
        missing.append("step")
    if missing:
        raise ValueError(
            f"the checkpoint has {sorted(map(str, values))} for {name}, but no {missing}, which "
            f"{type(optimizer).__name__} keeps; {REMEDY}, or delete all of this parameter's to start it afresh"
        )
    for state in states:
        value = values[state]
        if not isinstance(value, Tensor):
            raise ValueError(f"state {state!r} of {name} is {type(value).__name__}, not a tensor; {REMEDY}")
        if not is_lazy(param):
            check_fit(name, param, state, value, REMEDY)
    if optimizer.counts_steps and not _is_count(values["step"]):
        raise ValueError(f"'step' of {name} is {values['step']!r}, not a number of steps; {REMEDY}")


def _is_count(step: object) -> bool:
    """Whether this is a number of steps: an int in torch_npu's checkpoints, a tensor in torch's."""
    if isinstance(step, Tensor):
        step = step.item() if step.numel() == 1 else None
    return isinstance(step, int | float) and math.isfinite(step) and step >= 0 and step == int(step)


def _fitted(param: Tensor, value: Any, key: object = None) -> Any:
    """A state on its parameter's device, in its dtype; or in a better one, if it was saved so and the step uses it."""
    if isinstance(value, dict):
        return {key: _fitted(param, item, key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_fitted(param, item) for item in value)
    if not isinstance(value, Tensor) or key == "step":  # steps are counted on the host
        return value
    dtype = value.dtype
    if value.is_complex() and param.is_complex():
        dtype = param.dtype
    elif value.is_floating_point() and param.is_floating_point():
        wider = torch.finfo(value.dtype).bits > torch.finfo(param.dtype).bits
        dtype = compute_dtype(param.dtype) if wider else param.dtype
    return value.to(param.device, dtype)
