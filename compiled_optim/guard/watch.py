"""Watch a module: notice when one of its attributes no longer holds the parameter it held before.

An optimizer holds parameter objects. A module can replace or drop a parameter without the optimizer's knowledge; only
looking into the module shows it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from compiled_optim.engine.sharding import has_dtensor, is_dtensor
from compiled_optim.guard.check import same_objects


class Watch:
    """The parameters of a module by name, as of the last refresh. A tied parameter has several names."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.places: dict[str, Tensor] = {}
        self._contents: list[dict[str, Any]] = []
        self.refresh()

    def refresh(self) -> None:
        """Record the module as it is now."""
        modules = list(self.module.modules())
        # a module that never had a parameter or submodule may get one, but none that the optimizer has to know
        known = {id(content) for content in self._contents}
        contents = [content for module in modules for content in (module._parameters, module._modules)]
        self._contents = [content for content in contents if content or id(content) in known]
        self._held = self._read()
        self.places = self.current()

    def notice_new_places(self) -> None:
        """Record parameters under new names; changes under known names are still to be reported."""
        self.places = {**self.current(), **self.places}

    def current(self) -> dict[str, Tensor]:
        """Return the parameters by name as they are now."""
        held = self.module.named_parameters(remove_duplicate=False)
        return {name: self._sharded(self.places.get(name), param) for name, param in held}

    def holds(self) -> bool:
        """Return True if the module and its submodules hold the objects they held before."""
        return same_objects(self._read(), self._held) or self._is_reshard_pending()

    def _is_reshard_pending(self) -> bool:
        """Return True if only FSDP resharding is pending."""
        if not has_dtensor(list(self.places.values())):
            return False
        now = self.current()
        return list(now) == list(self.places) and same_objects([*now.values()], [*self.places.values()])

    @staticmethod
    def _sharded(before: Tensor | None, now: Tensor) -> Tensor:
        """Return the parameter the optimizer knows: between forward and backward, FSDP puts unsharded tensors there."""
        return before if before is not None and is_dtensor(before) and not is_dtensor(now) else now

    def _read(self) -> list[Any]:
        return [value for content in self._contents for value in content.values()]
