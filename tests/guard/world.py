"""A module, an optimizer over it, and the expected content of every parameter of the module.

``CheckedWorld.step`` steps both sides and compares everything. ``mutations.World`` adds what users do in between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import compiled_optim as co
from tests.helpers import assert_same_state, params_of

from .place import OPTIONS, Place
from .structure import Slot, Structure, slots_of


def linear() -> nn.Linear:
    return nn.Linear(2, 2, bias=False)


class Pair(nn.Module):
    """Two parameters that can be parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))


class Net(nn.Module):
    """Layers with several dimensions, a ModuleList and a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2)
        self.fc = nn.Linear(3, 4)
        self.pair = Pair()
        self.layers = nn.ModuleList([linear(), linear()])
        self.seq = nn.Sequential(linear(), linear())


class CheckedWorld:
    """The module, the optimizer under test, and the expected content of the module."""

    def __init__(self, compiled: bool, policy: str, device: str = "cpu", layout: str | None = None) -> None:
        torch.manual_seed(0)
        self.generator = torch.Generator().manual_seed(1)
        self.net = Net().to(device)
        self.policy, self.compiled = policy, compiled
        by_group: list[list[Any]] = [[], []]
        self.content: dict[Tensor, Place] = {}
        for i, (name, param) in enumerate(self.net.named_parameters()):
            by_group[i % 2].append((name, param))
            self.content[param] = Place(param, i % 2)
        groups = [{"params": params} for params in by_group]
        self.optimizer = co.AdamW(groups, **OPTIONS, compile=compiled, on_realloc=policy, layout=layout)
        self.optimizer.watch(self.net)
        self.structure = Structure(self.slots())
        self.disturbed: set[Place] = set()
        self.seen: dict[Place, object] = {}  # where the parameters were in the last step
        self.pocket: nn.Module | None = None
        self.saved: object = None
        self.homes = {device}  # the devices on which the optimizer has seen parameters since the last step
        self.is_moved = self.is_cast = False  # since the last step
        self.new_scheduler()

    def new_scheduler(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def random(self, shape, dtype=torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype)

    def names(self) -> list[str]:
        return [name for name, _ in self.net.named_parameters()]

    def param(self, name: str) -> Tensor:
        return self.net.get_parameter(name)

    def place(self, name: str) -> Place:
        return self.content[self.param(name)]

    def owner(self, name: str) -> tuple[nn.Module, str]:
        """Return the module that has a parameter, and the name of the attribute."""
        path, _, attribute = name.rpartition(".")
        return self.net.get_submodule(path), attribute

    def set(self, name: str, value: nn.Parameter | None) -> None:
        setattr(*self.owner(name), value)

    def slots(self) -> list[Slot]:
        for param in self.net.parameters():
            if param not in self.content:
                self.content[param] = Place(param)
                self.content[param].grad = None if param.grad is None else param.grad.detach().cpu().clone()
        return list(slots_of(self.net, self.content))

    def device(self) -> torch.device:
        return next(self.net.parameters()).device

    def is_pending(self) -> bool:
        """Return whether the optimizer has to follow something."""
        return bool(self.disturbed) or not self.structure.is_same(self.slots())

    def copyable(self) -> bool:
        """Return whether deepcopy works: it fails for tensors of the test device, and for pruned modules."""
        held = [*params_of(self.optimizer), *self.net.parameters()]
        owners = [slot.owner for slot in self.structure.slots if slot.owner is not None]
        keys = [key for module in (*self.net.modules(), *owners) for key in module._parameters]
        return all(param.device.type == "cpu" for param in held) and not any(key.endswith("_orig") for key in keys)

    def step(self) -> None:
        """Step, and compare everything with the expected content."""
        if self.policy == "raise" and self.reported():
            self.refused()
            return
        self.optimizer.step()
        self.follow()
        self.check_members()
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                self.content[param].step(group["lr"])
        self.check()

    def reported(self) -> set[str]:
        """Return the names of the parameters that ReallocationError has to name."""
        now = self.slots()
        disturbed = {slot.name for slot in now if slot.place in self.disturbed and slot.place.group is not None}
        # memory that was freed may be allocated again: a parameter that is back where it was has not moved
        locations = {name: self.location(name) for name in self.names()}
        back = {name for name, found in locations.items() if found and found == self.seen.get(self.place(name))}
        return (disturbed - back) | self.structure.follow(self.net, now, apply=False)

    def location(self, name: str) -> object:
        """Return what the guard compares; None for the test device, whose tensors have no address."""
        param = self.param(name)
        if param.device.type != "cpu":
            return None
        return param.data_ptr(), param.dtype, param.shape, param.stride()

    def follow(self) -> None:
        """Change the expected content as the optimizer does when it follows what has changed."""
        now = self.slots()
        self.structure.follow(self.net, now)
        self.content = {param: self.content[param] for param in self.net.parameters()}
        for place in self.content.values():
            place.follow()
        self.disturbed.clear()
        self.seen = {self.place(name): self.location(name) for name in self.names()}
        self.homes = {self.device().type}
        self.is_moved = self.is_cast = False

    def refused(self) -> None:
        """Check that the step raises and changes nothing, and that it works with on_realloc="recompile"."""
        reported = self.reported()
        params = params_of(self.optimizer)
        before = [p.detach().cpu().clone() for p in params], self.state_dict()
        try:
            self.optimizer.step()
        except co.ReallocationError as error:
            named = {change.parameter.split("'")[1] for change in error.changes}
            assert named == reported, (named, reported)
        else:
            raise AssertionError(f"{reported} went unnoticed")
        assert [id(param) for param in params] == [id(param) for param in params_of(self.optimizer)]
        assert all(torch.equal(a, b.detach().cpu()) for a, b in zip(before[0], params, strict=True))
        assert_same_state(self.state_dict(), before[1])
        self.optimizer.on_realloc = self.policy = "recompile"
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

    def check_members(self) -> None:
        """Compare the groups, and the names in them, with the expected ones."""
        expected = {
            name: (id(param), self.content[param].group)
            for name, param in self.net.named_parameters()
            if self.content[param].group is not None
        }
        found = {}
        for number, group in enumerate(self.optimizer.param_groups):
            assert len({*group["param_names"]} - found.keys()) == len(group["params"]), "names are unique"
            found |= {n: (id(p), number) for n, p in zip(group["param_names"], group["params"], strict=True)}
        assert found == expected, (found, expected)
        held = {id(param) for param in params_of(self.optimizer)}
        assert {id(param) for param in self.optimizer.state} <= held, "no state of parameters that are gone"

    def check(self) -> None:
        for name in self.names():
            param, place = self.param(name), self.place(name)
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
