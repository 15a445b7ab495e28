"""Every optimizer of the package, with all that the tests and the benchmarks need to know about it.

Whatever runs over all optimizers takes them from CATALOG. A new optimizer is one entry here, and a formula in
``references.py`` if torch.optim does not have it.
"""

from __future__ import annotations

from catalog.entries import CATALOG
from catalog.entry import Entry, Measured, Options, Published

__all__ = ["CATALOG", "Entry", "Measured", "Options", "Published"]
