"""Check that a built site works without a network: pages load nothing from other hosts.

``python -m website.check build/site``
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LOADED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//|<link\b[^>]*>")
STYLE = re.compile(r"(?:url\(|@import )[\"']?(?:https?:)?//")
REMOTE = re.compile(r"\bhref=[\"']?(?:https?:)?//")


def remote_loads(path: Path) -> list[str]:
    """Return what a page or a style sheet loads from other hosts."""
    text = path.read_text()
    if path.suffix == ".css":
        return STYLE.findall(text)
    tags = [match[0] for match in LOADED.finditer(text)]
    # a <link> to another host is loaded unless it only names the address of the page
    return [tag for tag in tags if not tag.startswith("<link") or (REMOTE.search(tag) and "canonical" not in tag)]


def main() -> None:
    """Check all pages and style sheets below a directory."""
    site = Path(sys.argv[1])
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    found = {path: loads for path in files if (loads := remote_loads(path))}
    for path, loads in found.items():
        print(f"{path} loads from another host: {', '.join(loads)}")
    print(f"{len(files)} pages and style sheets, {len(found)} of them load from other hosts")
    if found or not files:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
