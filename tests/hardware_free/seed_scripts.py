"""The scripts of torch_npu's documentation on device ``npu``, followed by what that documentation forbids."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import compiled_optim as co
from compiled_optim import npu
from tests.helpers import distance, params_of
from tests.rules.test_npu import EXAMPLES, example, expected

STEPS = 3


def moved(net: nn.Module) -> None:
    net.cpu()


def replaced(net: nn.Module) -> None:
    net.weight = nn.Parameter(net.weight.detach() + 1)


def removed(net: nn.Module) -> None:
    net.bias = None


POLICIES = ("recompile", "raise")
CAUSES = {"module.cpu()": moved, "a new object": replaced, "None": removed}


def backward(params: list[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.device)


def after(name: str, cause: str, policy: str) -> dict[str, Any]:
    """Step a module on the NPU, change it, and step again; return what happened."""
    options = EXAMPLES[name]
    torch.manual_seed(0)
    net = nn.Linear(3, 4).to("npu")
    optimizer = getattr(npu, name)(net, **options, on_realloc=policy)
    for seed in range(STEPS):
        backward(list(net.parameters()), seed)
        optimizer.step()
    is_flat = any(", flat" in unit for batch in optimizer.explain().batches for unit in batch.units)
    states = {name: _on_cpu(optimizer.state[param]) for name, param in net.named_parameters()}
    values = {name: param.detach().cpu().clone() for name, param in net.named_parameters()}
    held = params_of(optimizer)
    CAUSES[cause](net)
    params = dict(net.named_parameters())
    # expected: the plain optimizer, eager and on the CPU, over copies, with the states assigned by hand
    twins = {name: nn.Parameter(param.detach().cpu().clone()) for name, param in params.items()}
    other = getattr(co, name.removeprefix("NpuFused"))(twins.values(), **options, compile=False)
    for key, twin in twins.items():
        if cause != "a new object" or key != "weight":
            other.state[twin] = states[key]
    backward(list(params.values()), STEPS)
    backward(list(twins.values()), STEPS)
    try:
        optimizer.step()
    except co.ReallocationError as error:
        unchanged = [torch.equal(p.detach().cpu(), v) for p, v in zip(held, values.values(), strict=True)]
        after_error = [_on_cpu(optimizer.state[param]) for param in held]
        same = all(torch.equal(a[key], b[key]) for a, b in zip(after_error, states.values(), strict=True) for key in a)
        changes = [change.kind for change in error.changes]
        return dict(is_flat=is_flat, raised=changes, unchanged=all(unchanged) and same)
    other.step()
    worst = max(distance(params[key], twins[key]) for key in params)
    return dict(is_flat=is_flat, raised=None, apart=worst, events=len(optimizer.explain().events))


def _on_cpu(states: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value.cpu()) if torch.is_tensor(value) else value for name, value in states.items()}


def seed_scripts() -> dict[str, Any]:
    """Return, for each of the five scripts, its difference from float64, and the results of each cause and policy."""
    found = {}
    for name in EXAMPLES:
        namespace: dict[str, Any] = {}
        exec(example(name, "npu", True), namespace)
        units = {unit for batch in namespace["fused_opt"].explain().batches for unit in batch.units}
        pairs = zip(namespace["results"], expected(name), strict=True)
        found[name] = dict(
            apart=[distance(result, wanted) for result, wanted in pairs],
            is_flat=all(", flat" in unit for unit in units),
            causes={f"{cause}, {policy}": after(name, cause, policy) for cause in CAUSES for policy in POLICIES},
        )
    return found
