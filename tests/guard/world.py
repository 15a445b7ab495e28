"""A module, an optimizer over it, and the expected content of every place of the module.

``CheckedWorld.step`` steps both sides and compares everything. ``mutations.World`` adds what users do in between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import compiled_optim as co
from tests.helpers import assert_same_state, params_of

from .place import OPTIONS, Place


class CheckedWorld:
    """The module, the optimizer under test, and the expected content of the module."""

    def __init__(self, compiled: bool, policy: str, device: str = "cpu", layout: str | None = None) -> None:
        torch.manual_seed(0)
        self.generator = torch.Generator().manual_seed(1)
        self.net = nn.ModuleDict({"conv": nn.Conv2d(2, 3, 2), "fc": nn.Linear(3, 4)}).to(device)
        self.policy, self.compiled = policy, compiled
        groups = [{"params": list(self.net[name].named_parameters(name))} for name in ("conv", "fc")]
        self.optimizer = co.AdamW(groups, **OPTIONS, compile=compiled, on_realloc=policy, layout=layout)
        self.optimizer.watch(self.net)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.places = {name: Place(param, name[0] == "f") for name, param in self.net.named_parameters()}
        self.disturbed: set[str] = set()
        self.saved: object = None
        self.home = device

    def random(self, shape, dtype=torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype)

    def param(self, name: str) -> Tensor:
        return self.net.get_parameter(name)

    def names(self) -> list[str]:
        return [name for name in self.places if self.get(name) is not None]

    def get(self, name: str) -> Tensor | None:
        owner, _, key = name.rpartition(".")
        return self.net.get_submodule(owner)._parameters.get(key)

    def set(self, name: str, value: nn.Parameter | None) -> None:
        owner, _, key = name.rpartition(".")
        setattr(self.net.get_submodule(owner), key, value)

    def device(self) -> torch.device:
        return next(self.net.parameters()).device

    def copyable(self) -> bool:
        """Return whether deepcopy works: it fails for tensors of the test device."""
        return all(param.device.type == "cpu" for param in params_of(self.optimizer))

    def step(self) -> None:
        """Step, and compare everything with the expected content."""
        if self.policy == "raise" and self.disturbed:
            self.refused()
            return
        self.optimizer.step()
        for place in self.places.values():
            place.follow()
            place.step(self.optimizer.param_groups[place.group]["lr"])
        self.disturbed.clear()
        self.home = self.device().type
        self.check()

    def refused(self) -> None:
        """Check that the step raises and changes nothing, and that it works with on_realloc="recompile"."""
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        before = [p.detach().cpu().clone() for p in params], self.state_dict()
        try:
            self.optimizer.step()
        except co.ReallocationError as error:
            named = {change.parameter.split("'")[1] for change in error.changes}
            assert named == self.disturbed, (named, self.disturbed)
        else:
            raise AssertionError(f"{self.disturbed} went unnoticed")
        assert all(torch.equal(a, b.detach().cpu()) for a, b in zip(before[0], params, strict=True))
        assert_same_state(self.state_dict(), before[1])
        self.optimizer.on_realloc = "recompile"
        self.policy = "recompile"
        self.step()
        self.optimizer.on_realloc = self.policy = "raise"

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state dict; deepcopy fails for tensors of the test device."""
        state_dict = self.optimizer.state_dict()
        groups = [dict(group) for group in state_dict["param_groups"]]
        states = {
            index: {f"{name} on {value.device}": value.cpu().clone() for name, value in state.items()}
            for index, state in state_dict["state"].items()
        }
        return {"param_groups": groups, "state": states}

    def check(self) -> None:
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        current = {id(self.param(name)) for name in self.names()}
        assert {id(p) for p in held} == current, "the optimizer holds what the module holds"
        assert {id(p) for p in self.optimizer.state} <= current, "no state of parameters that are gone"
        for name in self.names():
            param, place = self.param(name), self.places[name]
            self.close(name, param, place.value, place)
            state = self.optimizer.state.get(param, {})
            assert int(state.get("step", 0)) == place.steps, (name, state.get("step"), place.steps)
            for moment, expected in place.states.items():
                self.close(f"{moment} of {name}", state[moment], expected, place)
                assert state[moment].device == param.device
        if not self.compiled:
            assert self.optimizer.explain().mode == "eager"

    @staticmethod
    def close(name: str, actual: Tensor, expected: Tensor, place: Place) -> None:
        assert actual.dtype == expected.dtype, (name, actual.dtype, expected.dtype)
        assert actual.shape == expected.shape, (name, actual.shape, expected.shape)
        a, b = actual.detach().cpu().double(), expected.double()
        difference = float((a - b).abs().max() / (1 + b.abs().max())) if b.numel() else 0.0
        assert difference <= place.tolerance, (name, difference, actual, expected)
