"""Tests of the documentation site: docstrings as Markdown, generated pages and tables, nothing from other hosts."""

from __future__ import annotations

import doctest
import inspect
import re

import pytest
import torch

import compiled_optim as co
from catalog import ALL

pytest.importorskip("mkdocs", reason="the documentation is built with the extra docs")
pytest.importorskip("latex2mathml", reason="the documentation is built with the extra docs")

from mkdocs.exceptions import PluginError

from website import check, docstrings, hooks, optimizers


def test_examples_in_docstrings():
    assert doctest.testmod(docstrings).failed == 0


@pytest.mark.parametrize("name", ALL)
def test_docstrings_leave_no_restructured_text(name):
    text = inspect.cleandoc(getattr(co, name).__doc__)
    markdown = docstrings.to_markdown(text)
    assert not re.findall(r":\w+:`|\.\. math|(?<!`)``(?!`)|`_\b", markdown)
    assert markdown.count('display="block"') == text.count(".. math::")
    assert markdown.count('display="inline"') == text.count(":math:`")
    assert markdown.count("```") == 2 * markdown.count("```pycon") > 0


def test_a_formula_is_aligned_and_keeps_its_signs():
    mathml = docstrings.formula(r"a &= b_1 \\ c &= \sqrt{d} < lr", display=True)
    assert mathml.count("<mtr>") == 2
    assert "<msqrt>" in mathml
    assert "<mi>&</mi>" not in mathml
    assert '<mi mathvariant="normal">l</mi><mi mathvariant="normal">r</mi>' in mathml


def test_references_inside_the_package_are_links():
    text = docstrings.to_markdown("See :class:`~compiled_optim.AdamW` and :class:`torch.optim.Adam`.")
    assert text == "See [`AdamW`][compiled_optim.AdamW] and `torch.optim.Adam`."


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_the_page_of_an_optimizer(name):
    page = optimizers.page(ALL[name])
    assert page.startswith(f"# {name}\n\n[](){{#compiled_optim.{name}}}\n\n::: compiled_optim.{name}\n")
    assert f"`torch.optim.{name}`" in page
    assert f"`torch_npu.optim.NpuFused{name}`" in page


def test_states_are_measured():
    sizes = [optimizers.states(ALL["AdamW"], dtype, stored) for dtype, stored in optimizers.STORED.values()]
    assert [set(size) for size in sizes[:3]] == [{"exp_avg", "exp_avg_sq"}] * 3
    assert [optimizers.total(size) for size in sizes[:3]] == ["8", "4", "4"]
    assert [list(found) for _, found in optimizers.state_sets(ALL["SGD"])] == [[], ["momentum_buffer"]]


def test_refused_options_are_named():
    assert optimizers.states(ALL["AdamW"], torch.float32, {"lr": -1}) is None
    assert optimizers.total(None) == "refused"


def test_tables_have_every_optimizer():
    for table in (optimizers.choosing_table(), optimizers.memory_table()):
        rows = re.findall(r"^\| \[(\w+)\]", table, re.MULTILINE)
        assert rows == list(ALL)
    named = re.findall(r"\w+", optimizers.collectives_table())
    assert set(ALL) <= set(named)


def test_an_unknown_table_is_an_error():
    with pytest.raises(PluginError, match="there is no such table"):
        hooks.on_page_markdown("<!-- generated: nothing -->", None, None, None)
    with_table = hooks.on_page_markdown("<!-- generated: collectives -->", None, None, None)
    assert with_table == optimizers.collectives_table()


def test_links_to_files_of_the_project_become_pages():
    assert hooks.on_page_markdown("[a](../CHANGELOG.md#x)", None, None, None) == "[a](changelog.md#x)"


@pytest.mark.parametrize(
    "tag",
    [
        '<script src="https://example.org/a.js"></script>',
        "<script async src=//example.org/a.js></script>",
        '<img alt="a" src="http://example.org/a.png">',
        '<link rel="stylesheet" href="https://example.org/a.css">',
    ],
)
def test_what_a_page_loads_from_other_hosts_is_found(tag, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(f'<a href="https://example.org">a link is fine</a><script src="a.js"></script>{tag}')
    assert len(check.remote_loads(page)) == 1
    page.write_text('<a href="https://example.org">a link is fine</a><link href="a.css"><img src="a.png">')
    assert check.remote_loads(page) == []
