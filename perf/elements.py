"""Build HTML and SVG as trees of elements, so that all text is escaped and all tags are closed."""

from __future__ import annotations

from xml.etree.ElementTree import Element, tostring

Child = Element | str


def element(tag: str, *children: Child, **attributes: str | float) -> Element:
    """Return an element. ``class_`` is the attribute class; other underscores in names are hyphens."""
    made = Element(tag, {name.rstrip("_").replace("_", "-"): _text(value) for name, value in attributes.items()})
    for child in children:
        if isinstance(child, Element):
            made.append(child)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + child
        else:
            made.text = (made.text or "") + child
    return made


def html(root: Element) -> str:
    """Return a document as text."""
    return f"<!doctype html>\n{tostring(root, encoding='unicode', method='html')}\n"


def _text(value: str | float) -> str:
    """Format a coordinate with at most one decimal place."""
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")
