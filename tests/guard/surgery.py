"""Edits of the structure of a module, for fuzzing the guard. ``structure`` says what the optimizer should do then."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from .world import CheckedWorld, linear

LONGEST = 4
"""The number of layers up to which layers are added."""


class Double(nn.Module):
    """A parametrization that changes the values of its parameter, by a power of two so that nothing is rounded."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


def is_plain(owner: nn.Module, attribute: str) -> bool:
    """Return whether a parameter is neither a part of a parametrization nor pruned."""
    return not isinstance(owner, parametrize.ParametrizationList) and not attribute.endswith("_orig")


class Surgery(CheckedWorld):
    """A world with one method for each edit of the structure."""

    def new_layer(self) -> nn.Linear:
        return linear().to(self.device(), next(self.net.parameters()).dtype)

    def replace(self, name: str) -> None:
        old = self.param(name)
        self.set(name, nn.Parameter(self.random(old.shape, old.dtype).to(old.device)))

    def remove(self, name: str) -> None:
        if len(self.names()) > 1 and is_plain(*self.owner(name)):
            self.set(name, None)

    def put_back(self) -> None:
        """Add a parameter where one was removed."""
        for module in self.net.modules():
            for key, param in module._parameters.items():
                if param is None:
                    first = next(self.net.parameters())
                    setattr(module, key, nn.Parameter(self.random((2, 3), first.dtype).to(first.device)))
                    return

    def rename_parameter(self, name: str) -> None:
        owner, attribute = self.owner(name)
        new = attribute.removesuffix("_renamed") if attribute.endswith("_renamed") else f"{attribute}_renamed"
        if is_plain(owner, attribute) and getattr(owner, new, None) is None:
            if new in owner._parameters:  # None, where one was removed
                del owner._parameters[new]
            param = getattr(owner, attribute)
            delattr(owner, attribute)
            setattr(owner, new, param)

    def rename_module(self, name: str) -> None:
        key = name.partition(".")[0]
        if key.partition("_")[0] in ("conv", "fc", "pair"):
            new = key.removesuffix("_renamed") if key.endswith("_renamed") else f"{key}_renamed"
            setattr(self.net, new, self.net.get_submodule(key))
            delattr(self.net, key)

    def prepend(self) -> None:
        if len(self.net.layers) < LONGEST:
            self.net.layers.insert(0, self.new_layer())

    def append(self) -> None:
        if len(self.net.layers) < LONGEST:
            self.net.layers.append(self.new_layer())

    def pop_first(self) -> None:
        if len(self.net.layers):
            self.pocket = self.net.layers.pop(0)

    def pop_last(self) -> None:
        if len(self.net.layers):
            self.pocket = self.net.layers.pop(-1)

    def bring_back(self) -> None:
        """Append the last layer that was taken out."""
        if self.pocket is not None:
            layer, self.pocket = self.pocket, None
            if all(param.device == self.device() for param in layer.parameters()):
                self.net.layers.append(layer)

    def new_first_layer(self) -> None:
        if len(self.net.layers):
            self.net.layers[0] = self.new_layer()

    def swap(self) -> None:
        if len(self.net.layers) > 1:
            layers = self.net.layers
            layers[0], layers[-1] = layers[-1], layers[0]

    def reverse(self) -> None:
        self.net.layers = nn.ModuleList(reversed(self.net.layers))

    def sequential_insert(self) -> None:
        if len(self.net.seq) < LONGEST:
            self.net.seq.insert(0, self.new_layer())

    def sequential_append(self) -> None:
        if len(self.net.seq) < LONGEST:
            self.net.seq.append(self.new_layer())

    def sequential_delete(self) -> None:
        if len(self.net.seq):
            del self.net.seq[0]

    def sequential_replace(self) -> None:
        if len(self.net.seq):
            self.net.seq[-1] = self.new_layer()

    def wrap(self) -> None:
        if len(self.net.seq) and isinstance(self.net.seq[0], nn.Linear):
            self.net.seq[0] = nn.Sequential(self.net.seq[0], self.new_layer())

    def unwrap(self) -> None:
        if len(self.net.seq) and not isinstance(self.net.seq[0], nn.Linear):
            self.net.seq[0] = self.net.seq[0][0]

    def between_layers(self) -> None:
        """Move a layer from the Sequential to the ModuleList."""
        if len(self.net.seq) and isinstance(self.net.seq[-1], nn.Linear):
            self.net.layers.append(self.net.seq.pop(-1))

    def parametrize(self, name: str) -> None:
        self._parametrize(name, Double())

    def parametrize_identity(self, name: str) -> None:
        self._parametrize(name, nn.Identity())

    def _parametrize(self, name: str, parametrization: nn.Module) -> None:
        owner, attribute = self.owner(name)
        if self.can_compute() and is_plain(owner, attribute):
            place, address = self.place(name), self.param(name).data_ptr()
            parametrize.register_parametrization(owner, attribute, parametrization)
            new = f"{name.rpartition('.')[0]}.parametrizations.{attribute}.original"
            self.note_value(new, place, place.value / 2 if isinstance(parametrization, Double) else None, address)

    def remove_parametrization(self, name: str) -> None:
        owner, _ = self.owner(name)
        if self.can_compute() and isinstance(owner, parametrize.ParametrizationList):
            path, _, attribute = name.removesuffix(".original").rpartition(".parametrizations.")
            place, address = self.place(name), self.param(name).data_ptr()
            doubles = isinstance(owner[0], Double)
            parametrize.remove_parametrizations(self.net.get_submodule(path), attribute)
            self.note_value(f"{path}.{attribute}", place, place.value * 2 if doubles else None, address)

    def prune(self, name: str) -> None:
        owner, attribute = self.owner(name)
        # torch prunes contiguous tensors only
        if self.can_compute() and is_plain(owner, attribute) and self.param(name).is_contiguous():
            prune.l1_unstructured(owner, attribute, 0.5)

    def remove_pruning(self, name: str) -> None:
        owner, attribute = self.owner(name)
        if self.can_compute() and attribute.endswith("_orig"):
            attribute = attribute.removesuffix("_orig")
            place, address = self.place(name), self.param(name).data_ptr()
            value = place.value * getattr(owner, f"{attribute}_mask")
            prune.remove(owner, attribute)
            self.note_value(name.removesuffix("_orig"), place, value, address)

    def can_compute(self) -> bool:
        """Return whether a parameter may be computed: the guard recognises one from another device by its values."""
        return self.device().type == "cpu" and not self.is_moved

    def note_value(self, name: str, place, value: Tensor | None, address: int) -> None:
        """Check that a parameter is the same object, and note its new value and memory."""
        assert self.place(name) is place
        if self.param(name).data_ptr() != address:
            self.disturbed.add(place)
            place.move()
        if value is not None:
            place.value = value


EDITS: list[Callable[[Surgery], None]] = [
    Surgery.put_back,
    Surgery.prepend,
    Surgery.append,
    Surgery.pop_first,
    Surgery.pop_last,
    Surgery.bring_back,
    Surgery.new_first_layer,
    Surgery.swap,
    Surgery.reverse,
    Surgery.sequential_insert,
    Surgery.sequential_append,
    Surgery.sequential_delete,
    Surgery.sequential_replace,
    Surgery.wrap,
    Surgery.unwrap,
    Surgery.between_layers,
]
NAMED_EDITS: list[Callable[[Surgery, str], None]] = [
    Surgery.replace,
    Surgery.remove,
    Surgery.rename_parameter,
    Surgery.rename_module,
    Surgery.parametrize,
    Surgery.parametrize_identity,
    Surgery.remove_parametrization,
    Surgery.prune,
    Surgery.remove_pruning,
]
