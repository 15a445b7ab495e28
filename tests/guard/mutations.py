"""What users do to a module and its optimizer between two steps, for fuzzing the guard.

Each mutation is done twice: to the module as a user would do it, and to its expected content (``place.Place``) as the
documentation says. This module has those of gradients, values and memory; ``surgery`` has those of the structure of the
module, and ``state_edits`` those of the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import state_edits, surgery
from .place import DTYPES, Place
from .state_edits import StateEdits
from .surgery import Surgery


class World(Surgery, StateEdits):
    """A world with one method for each mutation."""

    def backward(self, skip: str = "") -> None:
        """Assign new gradients, views of one flat buffer as with DDP; the parameter ``skip`` gets none."""
        names = [name for name in self.names() if name != skip]
        self.slots()
        for name in self.names():
            self.param(name).grad = self.place(name).grad = None
        for dtype in dict.fromkeys(self.param(name).dtype for name in names):
            of_dtype = [name for name in names if self.param(name).dtype == dtype]
            bucket = self.random((sum(self.param(name).numel() for name in of_dtype),), dtype)
            for name, grad in zip(of_dtype, bucket.split([self.param(n).numel() for n in of_dtype]), strict=True):
                param = self.param(name)
                param.grad = grad.view(param.shape).to(param.device)
                self.place(name).grad = grad.view(param.shape).clone()

    def odd_gradient(self, name: str) -> None:
        """Assign a gradient with other strides."""
        param = self.param(name)
        grad = self.random(tuple(reversed(param.shape)))
        odd = grad.permute(*reversed(range(param.ndim)))
        if param.device.type != "cpu":  # the test device has contiguous tensors only
            odd = odd.contiguous()
        param.grad = None
        param.grad = odd.to(param.device, param.dtype)
        self.place(name).grad = odd.to(param.dtype)

    def no_gradient(self, name: str) -> None:
        self.param(name).grad = self.place(name).grad = None

    def values_in_place(self, name: str) -> None:
        if not self.is_moved:  # the guard recognises a parameter moved to another device by its values
            with torch.no_grad():
                self.param(name).mul_(0.5).add_(0.25)
            self.place(name).value.mul_(0.5).add_(0.25)

    def new_data(self, name: str) -> None:
        if self.param(name).device.type == "cpu":  # tensors of the test device have no address
            self.param(name).data = self.param(name).data.clone()
            self.note_move(name)

    def note_move(self, name: str) -> None:
        self.disturbed.add(self.place(name))
        self.place(name).move()

    def new_shape(self, name: str) -> None:
        param = self.param(name)
        shape = (param.shape[0] + 1, *param.shape[1:])
        value = self.random(shape, param.dtype)
        param.grad = None
        param.data = value.to(param.device)
        if self.is_moved:  # a new object that cannot be recognised: a new parameter
            self.content[param] = Place(value)
        else:
            self.place(name).start_afresh(value)
            self.disturbed.add(self.place(name))

    def resize(self, name: str) -> None:
        """Resize the storage: its memory moves, but shape and values do not change."""
        param = self.param(name)
        if param.device.type == "cpu":
            before = self.addresses()
            param.data.untyped_storage().resize_(param.untyped_storage().nbytes() + 8)
            self.note_moved(before)

    def addresses(self) -> dict[str, int]:
        return {name: self.param(name).data_ptr() for name in self.names()}

    def note_moved(self, before: dict[str, int]) -> None:
        """Note the parameters that have other addresses than before. Those in a flat buffer move together."""
        moved = {name for name, address in self.addresses().items() if before[name] != address}
        self.disturbed |= set(map(self.place, moved))

    def transposed_data(self, name: str) -> None:
        param = self.param(name)
        if param.ndim > 1 and param.device.type == "cpu":
            param.data = param.data.transpose(0, 1).contiguous().transpose(0, 1).clone()
            self.note_move(name)

    def overlap(self) -> None:
        """Let two parameters share a part of their memory."""
        pairs = [module for module in self.net.modules() if type(module).__name__ == "Pair"]
        params = [param for module in pairs for param in module.parameters()]
        if len(params) != 2 or self.is_moved or self.device().type != "cpu":
            return
        if params[0].dtype != params[1].dtype or any(param.shape != (6,) for param in params):
            return
        values = self.random((9,), params[0].dtype)
        memory = values.clone()
        places = [self.content[param] for param in params]
        for param, place, part in zip(params, places, (slice(0, 6), slice(3, 9)), strict=True):
            param.data = memory[part]
            place.value = values[part]
            place.tolerance = max(each.tolerance for each in places)
        self.disturbed |= {*places}

    def memory_format(self) -> None:
        if self.device().type == "cpu":
            before = self.addresses()
            self.net.to(memory_format=torch.channels_last)
            self.note_moved(before)

    def cast(self, method: str) -> None:
        # the guard recognises a parameter from another device by its values, and two casts may change them too much.
        # On the test device, which has no addresses, casts there and back cannot be seen
        if self.is_cast and {self.device().type, *self.homes} != {"cpu"}:
            return
        self.is_cast = True
        dtype = DTYPES[method]
        self.slots()
        for name in self.names():
            if self.param(name).dtype != dtype:
                self.disturbed.add(self.place(name))
                self.place(name).cast(dtype)
        getattr(self.net, method)()

    def to(self, device: str) -> None:
        # moving from the CPU to the device and back makes new parameters that the guard cannot recognise
        if self.device().type == device or (device == "cpu" and device in self.homes):
            return
        self.slots()
        before = {name: self.content.pop(self.param(name)) for name in self.names()}
        self.net.to(device)
        self.is_moved = True
        for name, place in before.items():
            self.content[self.param(name)] = place
            place.move()
        self.disturbed |= {*before.values()}


MUTATIONS: list[Callable[[World], None]] = [
    World.step,
    World.backward,
    World.overlap,
    World.memory_format,
    *surgery.EDITS,
    *state_edits.EDITS,
]
NAMED_MUTATIONS: list[Callable[[World, str], None]] = [
    World.backward,
    World.odd_gradient,
    World.no_gradient,
    World.values_in_place,
    World.new_data,
    World.new_shape,
    World.resize,
    World.transposed_data,
    *surgery.NAMED_EDITS,
    *state_edits.NAMED_EDITS,
]
CASTS = [*DTYPES]
DEVICES = ["cpu", "npu"]
Move = tuple[Callable[..., None], Any]
"""A mutation, and its argument: the number of a parameter for one of ``NAMED_MUTATIONS``, or None for no argument."""


def moves(devices: bool) -> list[Move]:
    """Return all mutations with their arguments, except the numbers of parameters."""
    found: list[Move] = [(mutation, ()) for mutation in (*MUTATIONS, World.step, World.step, World.backward)]
    found += [(mutation, None) for mutation in NAMED_MUTATIONS]
    found += [(World.cast, (method,)) for method in CASTS]
    return found + [(World.to, (device,)) for device in DEVICES * 3 if devices]


def play(world: World, sequence: Sequence[tuple[int, int]]) -> None:
    """Apply mutations between a first and two last steps; each is given by its number and that of a parameter."""
    actions = moves(world.device().type != "cpu")
    world.backward()
    world.step()
    for number, place in sequence:
        mutation, arguments = actions[number % len(actions)]
        names = world.names()
        mutation(world, *((names[place % len(names)],) if arguments is None else arguments))
        world.slots()
    world.backward()
    world.step()
    world.step()
