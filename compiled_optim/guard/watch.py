"""Watch a module: detect that one of its attributes no longer holds the same parameter.

An optimizer holds references to parameters. A module can replace or remove a parameter, and the optimizer can detect
this only by inspecting the module.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from compiled_optim.engine.tensor_types import has_dtensor, is_dtensor
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
        # skip empty dicts: parameters that are added later do not belong to the optimizer
        known = {id(content) for content in self._contents}
        contents = [content for module in modules for content in (module._parameters, module._modules)]
        self._contents = [content for content in contents if content or id(content) in known]
        self._held = self._read()
        self.places = self.current()

    def notice_new_places(self) -> None:
        """Record parameters with new names; keep the old record of known names, so that changes are still detected."""
        self.places = {**self.current(), **self.places}

    def current(self) -> dict[str, Tensor]:
        """Return the current parameters by name."""
        held = self.module.named_parameters(remove_duplicate=False)
        return {name: self._sharded(self.places.get(name), param) for name, param in held}

    def holds(self) -> bool:
        """Return True if the module and its submodules hold the same objects as at the last refresh."""
        return same_objects(self._read(), self._held) or self._is_reshard_pending()

    def _is_reshard_pending(self) -> bool:
        """Return True if only FSDP resharding is pending."""
        if not has_dtensor(list(self.places.values())):
            return False
        now = self.current()
        return list(now) == list(self.places) and same_objects([*now.values()], [*self.places.values()])

    @staticmethod
    def _sharded(before: Tensor | None, now: Tensor) -> Tensor:
        """Return the sharded parameter. Between forward and backward, FSDP puts an unsharded tensor in its place."""
        return before if before is not None and is_dtensor(before) and not is_dtensor(now) else now

    def _read(self) -> list[Any]:
        return [value for content in self._contents for value in content.values()]
