"""The page with the table of all optimizers is up to date."""

from __future__ import annotations

import compiled_optim as co
from catalog import ALL
from catalog.table import PAGE, page


def test_the_page_is_what_the_catalog_says():
    assert PAGE.read_text() == page(), "run python -m catalog.table"


def test_every_optimizer_has_a_formula_and_its_row():
    assert [name for name, entry in ALL.items() if not entry.formula] == []
    rows = PAGE.read_text().splitlines()
    assert all(sum(row.startswith(f"| `{name}` |") for row in rows) == 1 for name in ALL)
    assert all(hasattr(co, name) for name in ALL)
