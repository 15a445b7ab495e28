"""What is measured: each optimizer with its settings and the memory traffic it cannot avoid."""

from __future__ import annotations

from dataclasses import dataclass

from catalog import CATALOG, Entry, Measured, Options, Published


@dataclass(frozen=True)
class Rule:
    """An optimizer as every contender has to run it.

    With ``clip``, gradients are clipped to that norm before the step.
    """

    entry: Entry
    measured: Measured
    clip: float | None = None

    @property
    def ours(self) -> str:
        """The name of the class here, and in torch.optim if it is there."""
        return self.entry.name

    @property
    def options(self) -> Options:
        """The arguments of every contender."""
        return self.measured.options

    @property
    def norm(self) -> bool:
        """Whether a norm over all gradients is part of the step, by ``clip`` or by the rule itself."""
        return self.clip is not None or self.entry.sums == "all gradients"

    def published(self, module: str) -> Published | None:
        """Return the implementation that a module has, or None."""
        return next((found for found in self.measured.published if found.module == module), None)

    def bytes_per_parameter(self, itemsize: int) -> int:
        """What one pass has to move: parameter and states read and written, the gradient read.

        A norm over all gradients has to be known before the first parameter changes, so it reads them once more. The
        norms of one tensor, as in AdamP and Lamb, are counted as free: a tensor may stay in the cache meanwhile.
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
