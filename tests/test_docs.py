"""The examples in docstrings and on all pages are run, what they print is what the page shows, and links resolve."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
from pathlib import Path

import pytest

import compiled_optim
from compiled_optim.backends import registry

MODULES = [m.name for m in pkgutil.iter_modules(compiled_optim.__path__, "compiled_optim.")]
ROOT = Path(__file__).parent.parent
PAGES = [path.relative_to(ROOT).as_posix() for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", ["compiled_optim", *MODULES])
def test_docstrings(name):
    failures, _ = doctest.testmod(importlib.import_module(name))
    assert failures == 0


def check_page(page: str, text: str) -> int:
    """Run the Python blocks in order, in one namespace, as a reader would; a ``text`` block is what was printed.

    Of a ``diff`` block what stands there after the change is run. Lines are numbered as on the page, and ``...`` in a
    ``text`` block stands for anything. Returns how many were run.
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
def test_pages(page, monkeypatch):
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    monkeypatch.chdir(ROOT)  # for messages that quote a line of the page
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
    """The anchors of a page, as GitHub makes them."""
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
