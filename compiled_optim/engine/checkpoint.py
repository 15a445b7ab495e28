"""Read a checkpoint. All of it is checked before anything is changed.

torch.optim checks only the number of parameters. If anything else does not match, it fails in a later step or continues
with new states. Here loading raises an error that names the parameter. A state that was saved in a wider dtype than its
parameter is not rounded below the dtype in which the step computes.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from compiled_optim.engine.numbers import as_number, step_count
from compiled_optim.engine.rule import Group, Rule, all_params
from compiled_optim.engine.states import check_codes_fit, check_companions_fit, check_state_fits
from compiled_optim.engine.storage_options import KEYS as STORAGE_KEYS
from compiled_optim.engine.stored_states import COMPANIONS, SCALE, is_quantized
from compiled_optim.storage import compute_dtype
from compiled_optim.update_program import EMA

REMEDY = "load the checkpoint that belongs to this optimizer and model"

NOT_HYPERPARAMETERS = {
    *("params", "param_names"),
    *("base_momentum", "initial_lr", "max_lr", "max_momentum", "min_lr", "swa_lr"),  # of schedulers
    *STORAGE_KEYS,  # which belong to the optimizer and not to the checkpoint
}
"""Keys of a group that are not hyperparameters."""


def read(
    rule: Rule,
    groups: Sequence[Group],
    names: Sequence[str],
    defaults: Mapping[str, Any],
    saved: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the state and groups of a checkpoint for these parameters; raise ValueError if they do not match."""
    if not (
        isinstance(saved, Mapping)
        and isinstance(saved.get("state"), Mapping)
        and isinstance(saved.get("param_groups"), list | tuple)
    ):
        found = f"a dict with {sorted(map(str, saved))}" if isinstance(saved, Mapping) else type(saved).__name__
        raise ValueError(
            f"{found} is not a checkpoint of an optimizer; pass the result of {type(rule).__name__}.state_dict()"
        )
    _check_sizes(groups, saved["param_groups"])
    kept = []
    for number, group in enumerate(saved["param_groups"]):
        _check_is_same_optimizer(type(rule).__name__, number, group, defaults)
        whole = complete_group(rule, defaults, group)
        own_rule = rule.for_group(whole)
        kept.append((own_rule, _state_names(own_rule, number, whole)))
    loaded = [_in_order_of(own, group) for own, group in zip(groups, deepcopy(saved["param_groups"]), strict=True)]
    params = all_params(groups)
    keys = [(key, own) for group, own in zip(loaded, kept, strict=True) for key in group["params"]]
    owners = {key: (param, name, *own) for (key, own), param, name in zip(keys, params, names, strict=True)}
    stored = {id(param) for group in groups if any(map(group.get, STORAGE_KEYS)) for param in group["params"]}
    state: defaultdict[Any, Any] = defaultdict(dict)
    for key, values in saved["state"].items():
        if key in owners:
            param, name, own_rule, states = owners[key]
            values = {} if values is None else values
            states = own_rule.states_of(param, states)
            _check_states(own_rule, name, param, values, states)
            state[param] = _convert(param, values, states, rule.number_names, exactly=id(param) in stored)
        elif isinstance(values, Mapping) and any(isinstance(value, Tensor) for value in values.values()):
            raise ValueError(f"the checkpoint has a state for {key!r}, but none of its groups has such a parameter")
        else:
            state[key] = values  # an entry that user code has added; torch keeps it too
    for group, own in zip(loaded, groups, strict=True):
        group["params"] = own["params"]
        for key in STORAGE_KEYS:
            group.pop(key, None)
            if key in own:
                group[key] = own[key]
        if "param_names" in own:
            group.setdefault("param_names", own["param_names"])
    return {"state": state, "param_groups": loaded}


def _in_order_of(own: Group, saved: Group) -> Group:
    """Return a saved group in the order of an optimizer's own group, if both name the same parameters.

    The order differs if a module was changed, as parametrizations do, after one of the optimizers was constructed.
    Otherwise parameters are matched by their positions, as in torch.
    """
    names, saved_names = own.get("param_names"), saved.get("param_names")
    if names == saved_names or not names or not saved_names or len({*saved_names}) != len(saved["params"]):
        return saved
    keys = dict(zip(saved_names, saved["params"], strict=False))
    if sorted(names) != sorted(keys):
        return saved
    return {**saved, "params": [keys[name] for name in names], "param_names": list(names)}


def complete_group(rule: Rule, defaults: Mapping[str, Any], group: Group) -> Group:
    """Return a saved group with the keys an older checkpoint lacks.

    A missing flag gets the default of the constructor; another missing key that of this optimizer.
    """
    arguments = inspect.signature(type(rule)).parameters.values()
    flags = {argument.name: argument.default for argument in arguments if isinstance(argument.default, bool)}
    return {**defaults, **flags, **group}


def _check_sizes(own: Sequence[Group], saved: Sequence[Group]) -> None:
    """Raise if the numbers of groups or of their parameters differ. The messages begin like those of torch."""
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
    missing = numbers - group.keys() - NOT_HYPERPARAMETERS
    unknown = group.keys() - defaults.keys() - NOT_HYPERPARAMETERS
    if missing and unknown:
        raise ValueError(
            f"group {number} of the checkpoint was saved by another optimizer than {optimizer}: it has "
            f"{sorted(unknown)}, but no {sorted(missing)}; {REMEDY}"
        )


def _state_names(rule: Rule, number: int, group: Group) -> Sequence[str]:
    """Return the names of the states of a group; raise if a hyperparameter is unusable."""
    try:
        return rule.row(group, 1).variant.states
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"group {number} of the checkpoint has an unusable hyperparameter: {error}") from error


def _check_states(rule: Rule, name: str, param: Tensor, values: Any, states: Sequence[str]) -> None:
    """Raise if a parameter cannot be stepped with these states. A parameter that was never stepped has none."""
    if not isinstance(values, dict):
        raise ValueError(f"the state of {name} is {type(values).__name__}, not a dict; {REMEDY}")
    if all(value is None for value in values.values()):
        return
    # an average that is missing starts from the loaded weights
    missing = [each for each in (*states, *rule.numbers) if values.get(each) is None and each != EMA]
    if type(rule).counts_steps and "step" not in values:
        missing.append("step")
    if missing:
        raise ValueError(
            f"the checkpoint has {sorted(map(str, values))} for {name}, but no {missing}, which "
            f"{type(rule).__name__} keeps; {REMEDY}, or delete all of this parameter's states to start it fresh"
        )
    for state in [state for state in states if values.get(state) is not None]:
        value = values[state]
        if not isinstance(value, Tensor):
            raise ValueError(f"state {state!r} of {name} is {type(value).__name__}, not a tensor; {REMEDY}")
        if not is_lazy(param):
            check_state_fits(lambda: name, param, state, value, REMEDY, rule.reduced_dims(state))
            if value.dtype == torch.uint8:
                check_codes_fit(lambda: name, values, state, REMEDY)
    if not is_lazy(param):
        check_companions_fit(lambda: name, param, values, states, REMEDY)
    if rule.counts_steps and "step" in values and step_count(values["step"]) is None:
        raise ValueError(f"'step' of {name} is {values['step']!r}, not a number of steps; {REMEDY}")
    for number in rule.numbers:
        if as_number(values[number]) is None:
            raise ValueError(f"{number!r} of {name} is {values[number]!r}, not a number; {REMEDY}")


def _convert(
    param: Tensor,
    value: Any,
    states: Sequence[str],
    numbers: Sequence[str],
    key: object = None,
    exactly: bool = False,
) -> Any:
    """Return a state on the device of its parameter; ``numbers`` are the names of those that stay on the host.

    Its dtype is that of the parameter or, if it was saved in a wider one, that in which the step computes. Integers are
    converted if they are one of the rule's ``states``; a user's own stay integers. With ``exactly``, no bit of a float
    is lost: the next step converts it to the dtype in which the optimizer keeps it.
    """
    if isinstance(value, dict):
        kept = {name for state in states if is_quantized(value, state) for name in (state, state + SCALE)}
        kept |= {*COMPANIONS} & value.keys()
        return {
            key: item.to(param.device) if key in kept else _convert(param, item, states, numbers, key, exactly)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(_convert(param, item, states, numbers) for item in value)
    if not isinstance(value, Tensor) or key in numbers:
        return value
    dtype = value.dtype
    if value.is_complex() and param.is_complex():
        dtype = param.dtype
    elif param.is_floating_point() and (value.is_floating_point() or (key in states and not value.is_complex())):
        needs_more = value.is_floating_point() and torch.promote_types(value.dtype, param.dtype) != param.dtype
        wider = needs_more if exactly else value.is_floating_point() and value.itemsize > param.itemsize
        dtype = compute_dtype(param.dtype) if wider else param.dtype
    return value.to(param.device, dtype)
