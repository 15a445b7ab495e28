"""The optimizers that are measured, with their options and their minimum memory traffic."""

from __future__ import annotations

from dataclasses import dataclass

from catalog import CATALOG, Entry, Measured, Options, Published


@dataclass(frozen=True)
class Rule:
    """An optimizer with the options that all contenders use.

    If ``clip`` is given, gradients are clipped to that norm before the step.
    """

    entry: Entry
    measured: Measured
    clip: float | None = None

    @property
    def ours(self) -> str:
        """The name of the class in ``compiled_optim``, and in torch.optim if it has one."""
        return self.entry.name

    @property
    def options(self) -> Options:
        """The constructor arguments of every contender."""
        return self.measured.options

    @property
    def norm(self) -> bool:
        """True if the step needs a norm over all gradients, for ``clip`` or in the rule itself."""
        return self.clip is not None or self.entry.sums == "all gradients"

    def published(self, module: str) -> Published | None:
        """Return the implementation in a module, or None if it has none."""
        return next((found for found in self.measured.published if found.module == module), None)

    def bytes_per_parameter(self, itemsize: int) -> int:
        """Return the bytes that a step has to move: it reads parameter, states and gradient; it writes the first two.

        A norm over all gradients must be known before the first parameter changes, so the gradients are read twice. The
        norms of a single tensor, as in AdamP and Lamb, are not counted, because a tensor may stay in the cache.
        """
        reads, writes = 2 + self.measured.states + self.norm, 1 + self.measured.states
        return (reads + writes) * itemsize


def _rules() -> dict[str, Rule]:
    rules = {}
    for name, entry in CATALOG.items():
        if entry.measured is not None:
            rules[name] = Rule(entry, entry.measured)
            if entry.measured.clip is not None:
                rules[f"{name}+clip"] = Rule(entry, entry.measured, entry.measured.clip)
    return rules


RULES = _rules()
