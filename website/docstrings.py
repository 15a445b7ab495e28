"""Docstrings as Markdown: the reStructuredText that the package uses, with formulas as MathML.

A browser renders MathML without a script, so the site has formulas without a network. ``DocstringsAsMarkdown`` is an
extension of griffe, which reads the docstrings for mkdocstrings.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe
from latex2mathml.converter import convert

MATH_BLOCK = re.compile(r"^( *)\.\. math::\n((?:\1 +.*\n?|\n)+)", re.MULTILINE)
EXAMPLE = re.compile(r"^( *)>>> .*\n(?:\1.*\S.*\n?)*", re.MULTILINE)
INLINE_MATH = re.compile(r":math:`([^`]+)`")
NAMED_LINK = re.compile(r"`([^`<]+) <([^>`]+)>`_")
ROLE = re.compile(r":\w+:`~?([\w.]+)`")
LITERAL = re.compile(r"``([^`]+)``")
LEARNING_RATE = re.compile(r"(?<![A-Za-z\\])lr(?![A-Za-z])")
DOCS_PAGE = re.compile(r"(?<![\w`/(\[])docs/(\w+)\.md")


def formula(tex: str, display: bool = False) -> str:
    r"""Return a formula as MathML. Lines of a displayed formula end in ``\\`` and are aligned at ``&``.

    >>> "<msub><mi>a</mi><mn>1</mn></msub>" in formula("a_1")
    True
    """
    tex = LEARNING_RATE.sub(r"\\mathrm{lr}", " ".join(tex.split()))
    if display:
        tex = rf"\begin{{align*}}{tex}\end{{align*}}"
    return str(convert(tex, display="block" if display else "inline"))


def to_markdown(text: str) -> str:
    """Return a docstring in Markdown.

    >>> to_markdown("See :meth:`watch`; ``p.grad`` stays.")
    'See `watch`; `p.grad` stays.'
    """
    text = MATH_BLOCK.sub(_displayed, text)
    # in a span, because Markdown takes a formula at the start of a paragraph for a block
    text = INLINE_MATH.sub(lambda match: f"<span>{formula(match[1])}</span>", text)
    text = NAMED_LINK.sub(r"[\1](\2)", text)
    text = ROLE.sub(_reference, text)
    text = LITERAL.sub(r"`\1`", text)
    text = DOCS_PAGE.sub(r"`docs/\1.md`", text)
    return EXAMPLE.sub(_example, text)


def _displayed(match: re.Match[str]) -> str:
    indent = match[1]
    return f'{indent}<div class="formula">{formula(match[2], display=True)}</div>\n\n'


def _example(match: re.Match[str]) -> str:
    indent = match[1]
    lines = textwrap.indent(textwrap.dedent(match[0]).rstrip("\n"), indent)
    return f"{indent}```pycon\n{lines}\n{indent}```\n"


def _reference(match: re.Match[str]) -> str:
    """Return a link to a public class of the package, and the name alone of anything else."""
    package, _, name = match[1].rpartition(".")
    if package == "compiled_optim":
        return f"[`{name}`][{match[1]}]"
    return f"`{name if package.startswith('compiled_optim.') else match[1]}`"


class DocstringsAsMarkdown(griffe.Extension):
    """Converts every docstring that griffe reads."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Convert the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
