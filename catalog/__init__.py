"""The data that tests and benchmarks use for every optimizer of the package.

Code that runs over all optimizers takes them from CATALOG. To add an optimizer, add one entry, and a formula in
``references.py`` if torch.optim does not have it.
"""

from __future__ import annotations

from catalog.entries import CATALOG
from catalog.entry import Entry, Measured, Options, Published

__all__ = ["CATALOG", "Entry", "Measured", "Options", "Published"]
