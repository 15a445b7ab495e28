"""The data that tests and benchmarks use for every optimizer of the package.

Code that runs over all optimizers takes them from CATALOG; those that take matrices only are in MATRICES. To add an
optimizer, add one entry, and a formula in ``references.py`` if torch.optim does not have it.
"""

from __future__ import annotations

from catalog.entries import ALL, CATALOG, MATRICES
from catalog.entry import Entry, Measured, Options, Published

__all__ = ["ALL", "CATALOG", "MATRICES", "Entry", "Measured", "Options", "Published"]
