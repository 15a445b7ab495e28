"""The examples in docstrings and in the README are run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import compiled_optim

MODULES = [m.name for m in pkgutil.iter_modules(compiled_optim.__path__, "compiled_optim.")]
README = Path(__file__).parent.parent / "README.md"


@pytest.mark.parametrize("name", ["compiled_optim", *MODULES])
def test_docstrings(name):
    failures, _ = doctest.testmod(importlib.import_module(name))
    assert failures == 0


def test_readme():
    """The Python blocks run in order, in one namespace, as a reader would type them."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 3
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
