"""Edits of the states of an optimizer and of its groups, for fuzzing the guard."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.helpers import params_of

from .place import MOMENTS, Place
from .world import CheckedWorld


class StateEdits(CheckedWorld):
    """A world with one method for each edit of states, groups and checkpoints."""

    def states(self, name: str) -> dict[str, Any]:
        """Return the states of a parameter, for editing; empty if there are none, or if they will be dropped."""
        return self.optimizer.state.get(self.param(name), {}) if self.place(name).states else {}

    def step_in_place(self, name: str) -> None:
        if "step" in self.states(name):
            self.states(name)["step"].zero_()
            self.place(name).steps = 0

    def step_data(self, name: str) -> None:
        if "step" in self.states(name):
            self.states(name)["step"].data.add_(3)
            self.place(name).steps += 3

    def step_numpy(self, name: str) -> None:
        if "step" in self.states(name):
            self.states(name)["step"].numpy()[...] = 7
            self.place(name).steps = 7

    def step_tensor(self, name: str) -> None:
        if "step" in self.states(name):
            self.states(name)["step"] = torch.tensor(5.0)
            self.place(name).steps = 5

    def moments_in_place(self, name: str) -> None:
        for moment in MOMENTS:
            if moment in self.states(name):
                self.states(name)[moment].zero_()
                self.place(name).states[moment].zero_()

    def moments_moved(self, name: str) -> None:
        """Replace one state tensor by a new object, and assign new memory to another through ``.data``."""
        state = self.states(name)
        if "exp_avg" in state:
            state["exp_avg"] = state["exp_avg"] * 1.5
            state["exp_avg_sq"].data = state["exp_avg_sq"].data * 2
            for moment, factor in zip(MOMENTS, (1.5, 2), strict=True):
                self.place(name).states[moment] *= factor

    def forget(self, name: str) -> None:
        if self.optimizer.state.pop(self.param(name), None) is not None:
            self.place(name).forget()

    def new_state(self) -> None:
        """Assign an empty state."""
        self.optimizer.state = defaultdict(dict)
        for place in self.content.values():
            place.forget()

    def same_state(self) -> None:
        """Assign a new dict with the same content."""
        state = self.optimizer.state
        self.optimizer.state = defaultdict(dict, {param: dict(values) for param, values in state.items()})

    def zero_grad(self) -> None:
        """Drop the gradients. Changes of modules are followed then."""
        self.optimizer.zero_grad()
        if self.policy == "recompile" and not self.structure.is_same(self.slots()):
            self.follow()
            self.check_members()
        held = {id(param) for param in params_of(self.optimizer)}
        for param, place in self.content.items():
            if id(param) in held:
                place.grad = None

    def add_group(self) -> None:
        """Add a group with all parameters of the module that the optimizer does not have, or with a new layer."""
        if all(slot.place.group is not None for slot in self.slots()) and not hasattr(self.net, "extra"):
            dtype = next(self.net.parameters()).dtype
            self.net.extra = nn.Linear(2, 2).to(self.device(), dtype)
        lost = [slot.path for slot in self.structure.lost(self.slots())]
        new = [slot for slot in self.slots() if slot.place.group is None and slot.path not in lost]
        if new:
            self.optimizer.add_param_group({"params": [(slot.name, self.param(slot.name)) for slot in new]})
            self.new_scheduler()
            self.homes.add(self.device().type)
            for slot in new:
                slot.place.group = len(self.optimizer.param_groups) - 1
            added = {slot.place for slot in new}
            self.structure.slots = [slot for slot in self.structure.slots if slot.place not in added] + new
            self.disturbed -= added

    def remove_group(self) -> None:
        """Remove the last group and the states of its parameters."""
        if len(self.optimizer.param_groups) > 2 and not self.is_pending():
            for param in self.optimizer.param_groups.pop()["params"]:
                self.optimizer.state.pop(param, None)
                self.content[param].group = None
                self.content[param].forget()
            number = len(self.optimizer.param_groups)
            self.structure.vacant = [(group, old) for group, old in self.structure.vacant if group < number]
            self.new_scheduler()

    def schedule(self) -> None:
        self.scheduler.step()

    def by_name(self) -> dict[str, Place]:
        return {name: self.content[param] for name, param in self.net.named_parameters()}

    def save(self) -> None:
        if self.copyable() and not self.is_pending():
            self.saved = copy.deepcopy((self.optimizer.state_dict(), self.by_name(), self.net.state_dict()))

    def load(self) -> None:
        """Load an earlier checkpoint, if the parameters still have its names, groups, dtypes and shapes."""
        if self.saved is None or self.is_pending() or not self.copyable():
            return
        state_dict, places, values = copy.deepcopy(self.saved)

        def form(places: dict[str, Place]) -> dict[str, object]:
            return {name: (place.group, place.value.shape, place.value.dtype) for name, place in places.items()}

        if form(places) != form(self.by_name()) or values.keys() != self.net.state_dict().keys():
            return
        if len(state_dict["param_groups"]) != len(self.optimizer.param_groups) or self.overlaps():
            return
        self.net.load_state_dict(values)
        self.optimizer.load_state_dict(state_dict)
        for name, place in places.items():
            current = self.place(name)
            current.value.copy_(place.value)
            current.steps, current.states, current.tolerance = place.steps, place.states, place.tolerance

    def overlaps(self) -> bool:
        """Return whether two parameters share memory."""
        memory = [place.value.untyped_storage().data_ptr() for place in self.content.values()]
        return len({*memory}) < len(memory)

    def copied(self) -> None:
        """Continue with a copy of the module and its optimizer."""
        if (self.policy == "raise" and self.disturbed) or not self.copyable():
            return
        lr = [group["lr"] for group in self.optimizer.param_groups]
        expected = self.content, self.structure, self.disturbed
        self.net, self.optimizer, expected = copy.deepcopy((self.net, self.optimizer, expected))
        self.content, self.structure, self.disturbed = expected
        self.pocket = None
        self.new_scheduler()
        assert [group["lr"] for group in self.optimizer.param_groups] == lr
        for param, place in self.content.items():  # deepcopy copies neither gradients nor common memory
            place.grad = None if param.grad is None else param.grad.detach().cpu().clone()
            place.move()


EDITS: list[Callable[[StateEdits], None]] = [
    StateEdits.new_state,
    StateEdits.same_state,
    StateEdits.zero_grad,
    StateEdits.add_group,
    StateEdits.remove_group,
    StateEdits.schedule,
    StateEdits.save,
    StateEdits.load,
    StateEdits.copied,
]
NAMED_EDITS: list[Callable[[StateEdits, str], None]] = [
    StateEdits.step_in_place,
    StateEdits.step_data,
    StateEdits.step_numpy,
    StateEdits.step_tensor,
    StateEdits.moments_in_place,
    StateEdits.moments_moved,
    StateEdits.forget,
]
