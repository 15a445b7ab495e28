"""What users do to a module and its optimizer between two steps, for fuzzing the guard.

Each mutation is done twice: to the module as a user would do it, and to its expected content (``place.Place``) as the
documentation says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from .place import DTYPES, Place
from .world import CheckedWorld


class World(CheckedWorld):
    """A world with one method for each mutation."""

    def backward(self, skip: str = "") -> None:
        """Assign new gradients, views of one flat buffer as with DDP; the parameter ``skip`` gets none."""
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
        if param.device.type != "cpu":  # the test device has contiguous tensors only
            odd = odd.contiguous()
        param.grad = None
        param.grad = odd.to(param.device, param.dtype)
        self.places[name].grad = odd.to(param.dtype)

    def no_gradient(self, name: str) -> None:
        self.param(name).grad = self.places[name].grad = None

    def values_in_place(self, name: str) -> None:
        if name in self.disturbed:  # the guard recognises a parameter moved to another device by its values
            return
        with torch.no_grad():
            self.param(name).mul_(0.5).add_(0.25)
        self.places[name].value = (self.places[name].value * 0.5).add_(0.25)

    def new_data(self, name: str) -> None:
        if self.param(name).device.type == "cpu":  # tensors of the test device have no address
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
            before = self.addresses()
            param.data.untyped_storage().resize_(param.untyped_storage().nbytes() + 8)
            self.disturbed |= self.moved_since(before)

    def addresses(self) -> dict[str, int]:
        return {name: self.param(name).data_ptr() for name in self.names()}

    def moved_since(self, before: dict[str, int]) -> set[str]:
        """Return the parameters that have other addresses than before. Those in a flat buffer move together."""
        return {name for name, address in self.addresses().items() if before[name] != address}

    def transposed_data(self, name: str) -> None:
        param = self.param(name)
        if param.ndim > 1 and param.device.type == "cpu":
            param.data = param.data.transpose(0, 1).contiguous().transpose(0, 1).clone()
            self.disturbed.add(name)

    def memory_format(self) -> None:
        if self.device().type == "cpu":
            before = self.addresses()
            self.net.to(memory_format=torch.channels_last)
            self.disturbed |= self.moved_since(before)

    def cast(self, method: str) -> None:
        # the guard recognises a parameter moved between devices by its values; casts there and back may leave them
        # unchanged, or change them too much
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
        if self.policy == "raise":  # the error would name it, and refused() expects the names in disturbed
            return
        if len(self.names()) > 1:
            self.set(name, None)
            place = self.places[name]
            place.start_afresh(torch.zeros(place.value.shape, dtype=place.value.dtype))

    def put_back(self, name: str) -> None:
        """Add a parameter where one was removed, after a step that notices the removal."""
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
        """Replace one state tensor by a new object, and assign new memory to another through ``.data``."""
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
        for name in self.names():  # deepcopy of a parameter does not copy its gradient
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

    def to(self, device: str) -> None:
        # moving to the device and back between two steps makes new parameters with equal values: not tested
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
    """Apply the mutations between a first and two last steps; a move is the number of a mutation and of a place."""
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
