"""Read a checkpoint: all of it is checked before anything is changed, and no state is rounded below the step's dtype.

Torch loads what has the right number of parameters. If the rest does not fit, it fails in a later step or continues
with fresh states. Here the error comes at once and names the parameter.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from compiled_optim.engine.rule import Group, Rule
from compiled_optim.engine.states import check_state_fits
from compiled_optim.storage import compute_dtype

REMEDY = "load the checkpoint that belongs to this optimizer and model"

NOT_HYPERPARAMETERS = {
    *("params", "param_names"),
    *("base_momentum", "initial_lr", "max_lr", "max_momentum", "min_lr", "swa_lr"),  # of schedulers
}
"""Keys of a group that are no hyperparameters."""


def read(
    rule: Rule,
    groups: Sequence[Group],
    names: Sequence[str],
    defaults: Mapping[str, Any],
    saved: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the state and groups of a checkpoint for an optimizer's parameters; ValueError if they do not fit."""
    if not (
        isinstance(saved, Mapping)
        and isinstance(saved.get("state"), Mapping)
        and isinstance(saved.get("param_groups"), list | tuple)
    ):
        found = f"a dict with {sorted(map(str, saved))}" if isinstance(saved, Mapping) else type(saved).__name__
        raise ValueError(
            f"{found} is no optimizer's checkpoint; pass what state_dict() of {type(rule).__name__} returned"
        )
    _check_sizes(groups, saved["param_groups"])
    kept = []
    for number, group in enumerate(saved["param_groups"]):
        _check_is_same_optimizer(type(rule).__name__, number, group, defaults)
        kept.append(_state_names(rule, number, complete_group(rule, defaults, group)))
    loaded: list[Group] = deepcopy(list(saved["param_groups"]))
    params = [param for group in groups for param in group["params"]]
    keys = [(key, states) for group, states in zip(loaded, kept, strict=True) for key in group["params"]]
    owners = {key: (param, name, states) for (key, states), param, name in zip(keys, params, names, strict=True)}
    state: defaultdict[Any, Any] = defaultdict(dict)
    for key, values in saved["state"].items():
        if key in owners:
            param, name, states = owners[key]
            values = {} if values is None else values
            _check_states(rule, name, param, values, states)
            state[param] = _convert(param, values)
        elif isinstance(values, Mapping) and any(isinstance(value, Tensor) for value in values.values()):
            raise ValueError(f"the checkpoint has a state for {key!r}, but no group of it lists such a parameter")
        else:
            state[key] = values  # not a parameter's: the user's own, as in torch
    for group, own in zip(loaded, groups, strict=True):
        group["params"] = own["params"]
        if "param_names" in own:
            group.setdefault("param_names", own["param_names"])
    return {"state": state, "param_groups": loaded}


def complete_group(rule: Rule, defaults: Mapping[str, Any], group: Group) -> Group:
    """Return a saved group with the keys an older checkpoint lacks; a flag it does not have was not set."""
    arguments = inspect.signature(type(rule)).parameters.values()
    flags = {argument.name: argument.default for argument in arguments if isinstance(argument.default, bool)}
    return {**defaults, **flags, **group}


def _check_sizes(own: Sequence[Group], saved: Sequence[Group]) -> None:
    """Raise unless the groups hold as many parameters; the messages begin with torch's words."""
    for group in saved:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list | tuple):
            raise ValueError(f"a parameter group of the checkpoint is not a dict with 'params'; {REMEDY}")
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


def _check_is_same_optimizer(optimizer: str, number: int, group: Group, defaults: Mapping[str, Any]) -> None:
    """Raise if a group was saved by another optimizer."""
    numbers = {key for key, value in defaults.items() if not isinstance(value, bool | None)}
    missing, unknown = numbers - group.keys(), group.keys() - defaults.keys() - NOT_HYPERPARAMETERS
    if missing and unknown:
        raise ValueError(
            f"group {number} of the checkpoint is of another optimizer than {optimizer}: it has "
            f"{sorted(unknown)}, but no {sorted(missing)}; {REMEDY}"
        )


def _state_names(rule: Rule, number: int, group: Group) -> Sequence[str]:
    """Return which states a group's parameters have; raise if a step could not use its hyperparameters."""
    try:
        return rule.row(group, 1).variant.states
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"group {number} of the checkpoint has an unusable hyperparameter: {error}") from error


def _check_states(rule: Rule, name: str, param: Tensor, values: Any, states: Sequence[str]) -> None:
    """Raise unless a parameter could be stepped with these states; none at all are those of one never stepped."""
    if not isinstance(values, dict):
        raise ValueError(f"the state of {name} is {type(values).__name__}, not a dict; {REMEDY}")
    if all(value is None for value in values.values()):
        return
    missing = [state for state in states if values.get(state) is None]
    if rule.counts_steps and "step" not in values:
        missing.append("step")
    if missing:
        raise ValueError(
            f"the checkpoint has {sorted(map(str, values))} for {name}, but no {missing}, which "
            f"{type(rule).__name__} keeps; {REMEDY}, or delete all of this parameter's states to start it fresh"
        )
    for state in states:
        value = values[state]
        if not isinstance(value, Tensor):
            raise ValueError(f"state {state!r} of {name} is {type(value).__name__}, not a tensor; {REMEDY}")
        if not is_lazy(param):
            check_state_fits(name, param, state, value, REMEDY)
    if rule.counts_steps and not _is_count(values["step"]):
        raise ValueError(f"'step' of {name} is {values['step']!r}, not a number of steps; {REMEDY}")


def _is_count(step: object) -> bool:
    """Return True for a number of steps: an int in torch_npu's checkpoints, a tensor in torch's."""
    if isinstance(step, Tensor):
        step = step.item() if step.numel() == 1 else None
    return isinstance(step, int | float) and math.isfinite(step) and step >= 0 and step == int(step)


def _convert(param: Tensor, value: Any, key: object = None) -> Any:
    """Return a state on its parameter's device, in its dtype or, if it was saved wider, in the dtype of the step."""
    if isinstance(value, dict):
        return {key: _convert(param, item, key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_convert(param, item) for item in value)
    if not isinstance(value, Tensor) or key == "step":  # steps are counted on the host
        return value
    dtype = value.dtype
    if value.is_complex() and param.is_complex():
        dtype = param.dtype
    elif value.is_floating_point() and param.is_floating_point():
        wider = torch.finfo(value.dtype).bits > torch.finfo(param.dtype).bits
        dtype = compute_dtype(param.dtype) if wider else param.dtype
    return value.to(param.device, dtype)
