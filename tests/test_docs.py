"""The examples in docstrings and in the README are run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import compiled_optim
from compiled_optim.backends import registry

MODULES = [m.name for m in pkgutil.iter_modules(compiled_optim.__path__, "compiled_optim.")]
ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["compiled_optim", *MODULES])
def test_docstrings(name):
    failures, _ = doctest.testmod(importlib.import_module(name))
    assert failures == 0


@pytest.mark.parametrize(("page", "least"), [("README.md", 3), ("docs/backends.md", 2)])
def test_pages(page, least, monkeypatch):
    """The Python blocks run in order, in one namespace, as a reader would type them."""
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert len(blocks) >= least
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)
