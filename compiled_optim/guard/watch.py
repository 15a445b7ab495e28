"""Watch a module: detect that it holds other parameters or submodules, or holds them under other names.

An optimizer holds references to parameters. A module can replace, remove or rename a parameter, and the optimizer can
detect this only by inspecting the module.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

from torch import Tensor, nn

from compiled_optim.engine.tensor_types import has_dtensor, is_dtensor
from compiled_optim.guard.check import same_objects
from compiled_optim.guard.module_changes import Place, unparametrized

Held = Sequence[tuple[Tensor, Place]]
"""The parameters of a module and their places, in order. A tied parameter has several places."""

_values = methodcaller("values")
_dicts = attrgetter("_parameters", "_modules")


class Watch:
    """A module, and the parameters it held when this record was made."""

    def __init__(self, module: nn.Module, before: Held = ()) -> None:
        """Record a module; ``before`` is the last record of it."""
        self.module = module
        self.held = before
        self._submodules = list(module.modules())
        self._all = self._read_dicts()
        self._filled = [content for content in self._all if content]
        self._empty = [content for content in self._all if not content]
        self._keys, self._contents = self._read_keys(), self._read_contents()
        self._is_complete = True
        self.held = self.read()

    def notice(self, params: Collection[Tensor]) -> None:
        """Record parameters at their current places. The record of the others does not change.

        These parameters may leave the module before the next step. It would then look as it did when it was recorded,
        so :meth:`holds` returns False until there is a new record.
        """
        if self.holds():  # so all its parameters are recorded
            return
        new = [(param, place) for param, place in self.read() if param in params]
        if new:
            self._is_complete = False  # first, because an interrupt may come in between
            self.held = [*((param, place) for param, place in self.held if param not in params), *new]

    def read(self) -> Held:
        """Return the parameters that the module holds now.

        Between forward and backward, FSDP puts an unsharded tensor in the place of a sharded parameter. In this case
        the sharded one is returned.
        """
        sharded = {place.name: param for param, place in self.held if is_dtensor(param)}
        owners = dict(self.module.named_modules(remove_duplicate=False))
        found = []
        for name, param in self.module.named_parameters(remove_duplicate=False):
            own = sharded[name] if name in sharded and not is_dtensor(param) else param
            found.append((own, Place(self.module, name, owners.get(unparametrized(name).rpartition(".")[0]))))
        return found

    def holds(self) -> bool:
        """Return True if the module and its submodules hold the same objects under the same names as recorded."""
        unchanged = (
            self._is_complete
            and same_objects(self._read_dicts(), self._all)  # del list[i] makes a new dict
            and not any(self._empty)
            and self._read_keys() == self._keys
            and same_objects(self._read_contents(), self._contents)
        )
        return unchanged or (self._is_complete and self._is_reshard_pending())

    def _is_reshard_pending(self) -> bool:
        """Return True if only FSDP resharding is pending."""
        params = [param for param, _ in self.held]
        if not has_dtensor(params):
            return False
        now, places = self.read(), [place for _, place in self.held]
        return [place for _, place in now] == places and same_objects([param for param, _ in now], params)

    def _read_dicts(self) -> list[dict[str, Any]]:
        return list(chain.from_iterable(map(_dicts, self._submodules)))

    def _read_keys(self) -> list[str]:
        return list(chain.from_iterable(self._filled))

    def _read_contents(self) -> list[Any]:
        return list(chain.from_iterable(map(_values, self._filled)))
