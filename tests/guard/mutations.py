"""A small world for fuzzing the guard: a module, an optimizer over it, and a plain model of what must hold.

The model keeps, for every place of the module, the value, the states and the step count that must be there, in tensors
of its own. A step of the model is one step of torch.optim.AdamW on one parameter, in float32 or better, rounded to the
parameter's dtype. It knows nothing of batches, plans, addresses or guards. Each mutation is done to the module as a
user would, and to the model as the documentation says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import compiled_optim as co
from tests.helpers import assert_same_state, params_of

OPTIONS = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-2, "weight_decay": 0.1}
MOMENTS = ("exp_avg", "exp_avg_sq")
DTYPES = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64}
TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5, torch.float64: 1e-12}


class Place:
    """The expected content of one attribute of the module."""

    def __init__(self, value: Tensor, group: int) -> None:
        self.value = value.detach().cpu().clone()
        self.group = group
        self.grad: Tensor | None = None
        self.steps = 0
        self.states: dict[str, Tensor] = {}
        self.seen = value.dtype
        self.tolerance = TOLERANCES[value.dtype]  # of the coarsest dtype that ever rounded it

    def cast(self, dtype: torch.dtype) -> None:
        self.value = self.value.to(dtype)
        self.grad = None if self.grad is None else self.grad.to(dtype)
        self.tolerance = max(self.tolerance, TOLERANCES[dtype])

    def follow(self) -> None:
        """States are cast by the step that sees the new dtype."""
        self.states = {
            name: state.to(self.value.dtype) if state.dtype == self.seen else state
            for name, state in self.states.items()
        }
        self.seen = self.value.dtype

    def start_afresh(self, value: Tensor) -> None:
        self.__init__(value, self.group)

    def step(self, lr: float) -> None:
        if self.grad is None:
            return
        wide = torch.promote_types(self.value.dtype, torch.float32)
        param = nn.Parameter(self.value.to(wide))
        param.grad = self.grad.to(wide)
        optimizer = torch.optim.AdamW([param], **{**OPTIONS, "lr": lr}, foreach=False)
        if self.states:
            states = {name: state.to(wide) for name, state in self.states.items()}
            optimizer.state[param] = {"step": torch.tensor(float(self.steps)), **states}
        optimizer.step()
        dtypes = {name: state.dtype for name, state in self.states.items()}
        self.steps += 1
        self.value = param.detach().to(self.value.dtype)
        self.states = {
            name: optimizer.state[param][name].to(dtypes.get(name, self.value.dtype)).clone() for name in MOMENTS
        }


class World:
    """The module, the optimizer under test, and the model."""

    def __init__(self, compiled: bool, policy: str, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.generator = torch.Generator().manual_seed(1)
        self.net = nn.ModuleDict({"conv": nn.Conv2d(2, 3, 2), "fc": nn.Linear(3, 4)}).to(device)
        self.policy, self.compiled = policy, compiled
        groups = [{"params": list(self.net[name].named_parameters(name))} for name in ("conv", "fc")]
        self.optimizer = co.AdamW(groups, **OPTIONS, compile=compiled, on_realloc=policy)
        self.optimizer.watch(self.net)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.places = {name: Place(param, name[0] == "f") for name, param in self.net.named_parameters()}
        self.disturbed: set[str] = set()
        self.saved: object = None
        self.home = device

    # ---- helpers

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

    # ---- what a user does

    def step(self) -> None:
        """Step, and compare everything with the model."""
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

    def backward(self, skip: str = "") -> None:
        """New gradients, DDP-style views of one flat buffer; one parameter may be left out."""
        names = [name for name in self.names() if name != skip]
        for name in self.names():
            self.param(name).grad = self.places[name].grad = None
        for dtype in dict.fromkeys(self.param(name).dtype for name in names):
            of_dtype = [name for name in names if self.param(name).dtype == dtype]
            bucket = self.random((sum(self.param(name).numel() for name in of_dtype),), dtype)
            for name, grad in zip(of_dtype, bucket.split([self.param(n).numel() for n in of_dtype]), strict=True):
                param = self.param(name)
                param.grad = grad.view(param.shape).to(param.device)
                self.places[name].grad = grad.view(param.shape).clone()

    def odd_gradient(self, name: str) -> None:
        """Assign a gradient with other strides and another dtype."""
        param = self.param(name)
        grad = self.random(tuple(reversed(param.shape)))
        odd = grad.permute(*reversed(range(param.ndim)))
        if param.device.type != "cpu":  # knows no other strides
            odd = odd.contiguous()
        param.grad = None
        param.grad = odd.to(param.device, param.dtype)
        self.places[name].grad = odd.to(param.dtype)

    def no_gradient(self, name: str) -> None:
        self.param(name).grad = self.places[name].grad = None

    def values_in_place(self, name: str) -> None:
        if name in self.disturbed:  # only by its values is a new object known to be the old one on another device
            return
        with torch.no_grad():
            self.param(name).mul_(0.5).add_(0.25)
        self.places[name].value = (self.places[name].value * 0.5).add_(0.25)

    def new_data(self, name: str) -> None:
        if self.param(name).device.type == "cpu":  # else it has no address
            self.param(name).data = self.param(name).data.clone()
            self.disturbed.add(name)

    def new_shape(self, name: str) -> None:
        param = self.param(name)
        shape = (param.shape[0] + 1, *param.shape[1:])
        value = self.random(shape, param.dtype)
        param.grad = None
        param.data = value.to(param.device)
        self.places[name].start_afresh(value)
        self.disturbed.add(name)

    def resize(self, name: str) -> None:
        """Resize the storage: its memory moves, but shape and values do not change."""
        param = self.param(name)
        if param.device.type == "cpu":
            before = param.data_ptr()
            param.data.untyped_storage().resize_(param.untyped_storage().nbytes() + 8)
            if param.data_ptr() != before:
                self.disturbed.add(name)

    def transposed_data(self, name: str) -> None:
        param = self.param(name)
        if param.ndim > 1 and param.device.type == "cpu":
            param.data = param.data.transpose(0, 1).contiguous().transpose(0, 1).clone()
            self.disturbed.add(name)

    def memory_format(self) -> None:
        if self.device().type == "cpu":
            before = {name: self.param(name).data_ptr() for name in self.names()}
            self.net.to(memory_format=torch.channels_last)
            self.disturbed |= {name for name, address in before.items() if self.param(name).data_ptr() != address}

    def cast(self, method: str) -> None:
        # between devices, casts there and back leave no trace but the address, or one too many for the values to tell
        if self.disturbed and {self.device().type, self.home} != {"cpu"}:
            return
        dtype = DTYPES[method]
        for name in self.names():
            if self.param(name).dtype != dtype:
                self.disturbed.add(name)
                self.places[name].cast(dtype)
        getattr(self.net, method)()

    def replace(self, name: str) -> None:
        old = self.param(name)
        value = self.random(old.shape, old.dtype)
        self.set(name, nn.Parameter(value.to(old.device)))
        self.places[name].start_afresh(value)
        self.disturbed.add(name)

    def remove(self, name: str) -> None:
        if self.policy == "raise":  # it would stay removed for a step, and names are compared
            return
        if len(self.names()) > 1:
            self.set(name, None)
            place = self.places[name]
            place.start_afresh(torch.zeros(place.value.shape, dtype=place.value.dtype))

    def put_back(self, name: str) -> None:
        """Add a parameter where one is missing; it is noticed only if the removal was."""
        if self.get(name) is None:
            self.step()
            place = self.places[name]
            device = self.device()
            value = self.random(place.value.shape, place.value.dtype)
            self.set(name, nn.Parameter(value.to(device)))
            place.start_afresh(value)

    def save(self) -> None:
        if self.copyable() and not self.disturbed and all(self.get(name) is not None for name in self.places):
            self.saved = copy.deepcopy((self.optimizer.state_dict(), self.places, self.net.state_dict()))

    def load(self) -> None:
        """Load an earlier checkpoint, if the parameters still have its dtype and shape."""
        if self.saved is None or self.disturbed or any(self.get(name) is None for name in self.places):
            return
        state_dict, places, values = copy.deepcopy(self.saved)
        if places.keys() != self.places.keys() or any(
            self.param(name).shape != places[name].value.shape or self.param(name).dtype != places[name].value.dtype
            for name in self.places
        ):
            return
        self.net.load_state_dict(values)
        self.optimizer.load_state_dict(state_dict)
        for name, place in places.items():
            place.grad = self.places[name].grad
            self.places[name] = place

    def move_states(self, name: str) -> None:
        """State tensors replaced, and moved under the same object, by the user."""
        state = self.optimizer.state.get(self.param(name), {})
        if "exp_avg" in state and not self.disturbed and self.param(name).device.type == "cpu":
            state["exp_avg"] = state["exp_avg"] * 1.5
            state["exp_avg_sq"].data = state["exp_avg_sq"].data * 2
            place = self.places[name]
            place.states["exp_avg"] = place.states["exp_avg"] * 1.5
            place.states["exp_avg_sq"] = place.states["exp_avg_sq"] * 2

    def copied(self) -> None:
        if self.policy == "raise" or not self.copyable():
            return
        lr = [group["lr"] for group in self.optimizer.param_groups]
        self.net, self.optimizer = copy.deepcopy((self.net, self.optimizer))
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        assert [group["lr"] for group in self.optimizer.param_groups] == lr
        for name in self.names():  # torch does not copy gradients along with a parameter of its own
            grad = self.param(name).grad
            self.places[name].grad = None if grad is None else grad.detach().cpu().clone()

    def schedule(self) -> None:
        self.scheduler.step()

    def add_group(self) -> None:
        if "extra" not in self.net:
            self.net["extra"] = nn.Linear(2, 2).to(self.device(), next(self.net.parameters()).dtype)
            self.optimizer.add_param_group({"params": list(self.net["extra"].named_parameters("extra"))})
            self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
            number = len(self.optimizer.param_groups) - 1
            for name, param in self.net["extra"].named_parameters("extra"):
                self.places[name] = Place(param, number)

    def copyable(self) -> bool:
        """Tensors of the test device cannot be copied with deepcopy."""
        return all(param.device.type == "cpu" for param in params_of(self.optimizer))

    def device(self) -> torch.device:
        return next(self.net.parameters()).device

    def to(self, device: str) -> None:
        # to the device and back to the CPU between two steps looks like new parameters with equal values, and is
        if self.device().type != device and not device == self.home == "cpu":
            self.net.to(device)
            self.disturbed |= set(self.names())


WITHOUT_ARGUMENT: list[Callable[[World], None]] = [
    World.step,
    World.backward,
    World.memory_format,
    World.save,
    World.load,
    World.copied,
    World.schedule,
    World.add_group,
]
WITH_NAME: list[Callable[[World, str], None]] = [
    World.backward,
    World.odd_gradient,
    World.no_gradient,
    World.values_in_place,
    World.new_data,
    World.new_shape,
    World.resize,
    World.transposed_data,
    World.replace,
    World.remove,
    World.put_back,
    World.move_states,
]
PLACES = ["conv.weight", "conv.bias", "fc.weight", "fc.bias"]


def play(world: World, moves: list[tuple[int, int]]) -> None:
    """Make the moves, each a number of a mutation and of a place, with gradients and a step in between."""
    actions = [(mutation, ()) for mutation in WITHOUT_ARGUMENT]
    actions += [(mutation, (None,)) for mutation in WITH_NAME]
    actions += [(World.cast, (method,)) for method in DTYPES]
    if world.device().type != "cpu":
        actions += [(World.to, (device,)) for device in ("cpu", "npu", "cpu", "npu")]
    world.backward()
    world.step()
    for number, place in moves:
        mutation, arguments = actions[number % len(actions)]
        if arguments == (None,):
            name = PLACES[place % len(PLACES)]
            if world.get(name) is None and mutation is not World.put_back:
                continue
            arguments = (name,)
        mutation(world, *arguments)
    world.backward()
    world.step()
    world.step()
