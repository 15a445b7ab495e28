"""Tests of the documentation: examples run and print the output on the page, and links resolve."""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import pkgutil
import re
from pathlib import Path

import pytest

import compiled_optim
from catalog import ALL
from compiled_optim import backends
from compiled_optim.backends import registry

PACKAGES = (compiled_optim, backends)  # in an editable install, backends is not in the directory of the package
MODULES = sorted(
    {package.__name__ for package in PACKAGES}
    | {m.name for package in PACKAGES for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")}
)
ROOT = Path(__file__).parents[2]
PAGES = [path.relative_to(ROOT).as_posix() for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def has_examples(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return ">>> " in Path(spec.origin).read_text()


@pytest.mark.parametrize("name", list(filter(has_examples, MODULES)))
def test_examples_in_docstrings(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert result.attempted > 0, "no docstring has the examples of this file"


def test_the_modules_of_the_package_and_of_its_backends_are_visited():
    assert {"compiled_optim", "compiled_optim.optimizer", "compiled_optim.backends.cpu"} <= set(MODULES)


@pytest.mark.parametrize("name", ALL)
def test_every_optimizer_has_an_example(name):
    assert doctest.DocTestParser().get_examples(getattr(compiled_optim, name).__doc__)


def check_page(page: str, text: str) -> int:
    """Run the Python blocks of a page in order, in one namespace, and return their number.

    A ``text`` block is the expected output; ``...`` in it matches anything. For a ``diff`` block, the code after the
    change is run. Line numbers are those of the page.
    """
    namespace: dict[str, object] = {}
    printed = None
    count = 0
    for match in BLOCK.finditer(text):
        language, block = match.groups()
        if language == "diff":
            block = "\n".join("" if line.startswith("-") else line[2:] for line in block.splitlines())
        if language in ("python", "diff"):
            first_line = text[: match.start(2)].count("\n")
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile("\n" * first_line + block, page, "exec"), namespace)
            printed = output.getvalue()
            count += 1
        elif language == "text":
            assert printed is not None, f"{page}: nothing was printed before {block!r}"
            checker = doctest.OutputChecker()
            assert checker.check_output(block, printed, doctest.ELLIPSIS), (
                f"{page} shows\n{block}\nbut it is\n{printed}"
            )
    return count


@pytest.mark.parametrize("page", PAGES)
def test_examples_on_pages(page, monkeypatch):
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    monkeypatch.chdir(ROOT)  # for error messages that show a line of the page
    text = (ROOT / page).read_text()
    assert check_page(page, text) == len(re.findall("```(python|diff)", text))


def test_a_page_that_shows_something_else_is_found_out():
    check_page("page", "```python\nprint(1)\n```\n```text\n1\n```\n")
    with pytest.raises(AssertionError, match="but it is"):
        check_page("page", "```python\nprint(1)\n```\n```text\n2\n```\n")
    check_page("page", "```python\nx = 0\n```\n```diff\n- 1 / x\n+ x + 1\n  y = 1\n```\n```python\nassert y\n```\n")
    with pytest.raises(ZeroDivisionError):
        check_page("page", "```python\nx = 0\n```\nand\n```python\n1 / x\n```\n")


def headings(page: Path) -> set[str]:
    """Return the anchors of a page, as GitHub generates them."""
    text = BLOCK.sub("", page.read_text())
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    text = BLOCK.sub("", page.read_text())
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page):
    assert broken_links(ROOT / page) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Two words\n[a](#two-words) [b](#three) [c](page.md) [d](none.md) [e](https://example.org)\n")
    assert broken_links(page) == ["#three", "none.md"]
