"""Watching a module: does each of its places still hold the parameter it held before?

An optimizer holds parameter objects. A module can replace or drop one of its own without telling anybody; this is seen
only by looking into the module.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from compiled_optim import shards
from compiled_optim.guard import same_objects


class Watch:
    """The parameters of a module, by name, as they were when last looked at. A tied one has several names."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.places: dict[str, Tensor] = {}
        self._contents: list[dict[str, Any]] = []
        self.refresh()

    def refresh(self) -> None:
        """Take the module as it is now."""
        modules = list(self.module.modules())
        # one that never had a parameter or submodule may get one, but none that the optimizer has to know
        known = {id(content) for content in self._contents}
        contents = [content for module in modules for content in (module._parameters, module._modules)]
        self._contents = [content for content in contents if content or id(content) in known]
        self._held = self._read()
        self.places = self.current()

    def notice_new_places(self) -> None:
        """Take note of parameters in new places; what has changed in the others is still to be told."""
        self.places = {**self.current(), **self.places}

    def current(self) -> dict[str, Tensor]:
        """The parameters by name as they are now."""
        held = self.module.named_parameters(remove_duplicate=False)
        return {name: self._sharded(self.places.get(name), param) for name, param in held}

    def holds(self) -> bool:
        """Whether every place of the module and its submodules holds the object it held before."""
        return same_objects(self._read(), self._held) or self._is_unsharded()

    def _is_unsharded(self) -> bool:
        """Whether nothing is different but that FSDP has not put its shards back yet."""
        if not shards.any_dtensor(list(self.places.values())):
            return False
        now = self.current()
        return list(now) == list(self.places) and same_objects([*now.values()], [*self.places.values()])

    @staticmethod
    def _sharded(before: Tensor | None, now: Tensor) -> Tensor:
        """What a place holds for the optimizer: between forward and backward, FSDP puts whole tensors there."""
        return before if before is not None and shards.is_dtensor(before) and not shards.is_dtensor(now) else now

    def _read(self) -> list[Any]:
        return [value for content in self._contents for value in content.values()]
