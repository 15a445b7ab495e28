"""Routing: which parameter of a module follows which rule, and why. ``Muon(model)`` uses it.

The usual choice, in this order:

1. AdamW for parameters with less than two dimensions: biases, gains, scalars.
2. AdamW for the weights of ``nn.Embedding`` and ``nn.EmbeddingBag``, also if the head is tied to one.
3. AdamW for the head: the weight of the ``nn.Linear`` that the module registered last.
4. AdamW for parameters with more than two dimensions, unless ``flatten`` or ``batch_dims`` makes matrices of them.
5. Muon for the rest: hidden matrices.

A module without a head, such as a part of a model, needs ``route={"name.of.its.last.weight": "muon"}``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from compiled_optim.diagnostics.text import MAX_NAMES, counted
from compiled_optim.engine.rule import Group

MUON, ADAMW = "muon", "adamw"
"""The values of ``group["rule"]``."""

Choice: TypeAlias = str | Mapping[str, Any] | None
Override: TypeAlias = Mapping[str, Choice] | Callable[[str, Tensor], Choice]
"""The option ``route``: choices by patterns of names, or a function of name and parameter."""


@dataclass(frozen=True)
class Route:
    """The rule of a parameter, why it has it, and further options of its group."""

    rule: str
    reason: str
    options: Mapping[str, Any] = field(default_factory=dict)


def routes_of(module: nn.Module, override: Override | None, takes_more: bool) -> dict[str, Route]:
    """Return the route of each parameter of a module by name.

    With ``takes_more``, parameters with more than two dimensions are matrices too. Raise ValueError if ``override`` is
    wrong, or names no parameter.
    """
    modules = list(module.modules())
    embeddings = {id(m._parameters.get("weight")) for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    linear = [m._parameters.get("weight") for m in modules if isinstance(m, nn.Linear)]
    head = linear[-1] if linear else None

    def usual(param: Tensor) -> Route:
        if param.ndim < 2:
            return Route(ADAMW, "vector" if param.ndim else "scalar")
        if id(param) in embeddings:
            return Route(ADAMW, "embedding")
        if param is head:
            return Route(ADAMW, "head")
        if param.ndim > 2:
            return Route(MUON, "matrices") if takes_more else Route(ADAMW, f"{param.ndim} dimensions")
        return Route(MUON, "matrix", {"batch_dims": 0} if takes_more else {})

    routes, used = {}, set()
    for name, param in module.named_parameters():
        choice: Choice = None
        if callable(override):
            choice = override(name, param)
        elif override is not None:
            matching = [pattern for pattern in override if fnmatchcase(name, pattern)]
            used.update(matching)
            choice = override[matching[0]] if matching else None
        routes[name] = usual(param) if choice is None else _chosen(name, choice)
    unused = [] if override is None or callable(override) else [pattern for pattern in override if pattern not in used]
    if unused:
        raise ValueError(f"route names {unused[0]!r}, but no parameter of {type(module).__name__} has such a name")
    return routes


def _chosen(name: str, choice: Any) -> Route:
    """Return the route that the user has chosen."""
    rule, options = (choice.get("rule", MUON), choice) if isinstance(choice, Mapping) else (choice, {})
    if rule not in (MUON, ADAMW):
        raise ValueError(f"route sends {name} to {rule!r}; use {MUON!r}, {ADAMW!r} or a dict of options")
    return Route(rule, "chosen", {key: value for key, value in options.items() if key != "rule"})


def in_groups(module: nn.Module, routes: Mapping[str, Route]) -> list[dict[str, Any]]:
    """Return parameter groups, one for each rule and set of options, Muon's first."""
    groups: dict[str, dict[str, Any]] = {}
    for name, param in module.named_parameters():
        route = routes[name]
        own = {"rule": route.rule, **route.options}
        groups.setdefault(repr(own), {**own, "params": []})["params"].append((name, param))
    return sorted(groups.values(), key=lambda group: group["rule"] != MUON)


def described(groups: Sequence[Group], reasons: Mapping[str, str]) -> list[str]:
    """Return a line for each group: its rule, its size, and its parameters by the reason why they are there."""
    lines = []
    for group in groups if any("rule" in group for group in groups) else ():
        rule = "AdamW" if group.get("rule") == ADAMW else "Muon"
        params = group["params"]
        by_reason: dict[str, list[str]] = {}
        for i, param in enumerate(params):
            name = group["param_names"][i] if "param_names" in group else f"a tensor of shape {tuple(param.shape)}"
            by_reason.setdefault(reasons.get(name, "group"), []).append(name)
        size = f"{counted(len(params), 'tensor')}, {sum(map(torch.numel, params)):,} elements"
        found = "; ".join(f"{reason}: {_listed(names)}" for reason, names in by_reason.items())
        lines.append(f"{rule}: {size} ({found})")
    return lines


def _listed(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    rest = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")
