"""Hooks of mkdocs: pages that are not files of docs/, and tables that are computed.

A page asks for a table with a comment: ``<!-- generated: memory -->``. The navigation in mkdocs.yml has the name
``optimizers`` in place of the list of their pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

from website import optimizers

ROOT = Path(__file__).parents[1]
TABLES = {
    "choosing": optimizers.choosing_table,
    "collectives": optimizers.collectives_table,
    "memory": optimizers.memory_table,
    "replaced": optimizers.replaced_table,
}
MARK = re.compile(r"<!-- generated: (\w+) -->")
OF_THE_PROJECT = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md"}
"""Pages that are files of the project, beside docs/."""

REMOTE_SCRIPT = "https://unpkg.com/iframe-worker/shim"
LOCAL_SCRIPT = "file_search.js"
"""The script that the theme loads from another host for its search, and ours in its place."""

OPTIONAL = {"optimizers.md", "storage.md"}
"""Pages that are left out of the navigation while they do not exist."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the optimizers into the navigation."""
    assert config.nav is not None
    config.nav = [_section(section, Path(config.docs_dir)) for section in config.nav]
    return config


def _section(section: dict[str, Any], docs: Path) -> dict[str, Any]:
    (title, content), *_ = section.items()
    if content == "optimizers":
        return {
            title: [{entry.name: f"optimizers/{optimizers.slug(entry)}.md"} for entry in optimizers.ENTRIES.values()]
        }
    if isinstance(content, list):
        missing = [
            page for page in content for path in page.values() if path in OPTIONAL and not (docs / path).exists()
        ]
        return {title: [page for page in content if page not in missing]}
    return section


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the optimizers, and those of the project."""
    for entry in optimizers.ENTRIES.values():
        source = f"optimizers/{optimizers.slug(entry)}.md"
        files.append(File.generated(config, source, content=optimizers.page(entry)))
    for name, page in OF_THE_PROJECT.items():
        text = (ROOT / name).read_text().replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the marks of tables, and the links to files of the project."""
    markdown = MARK.sub(_table, markdown)
    for name, target in OF_THE_PROJECT.items():
        markdown = markdown.replace(f"](../{name}", f"]({target}").replace(f"]({name}", f"]({target}")
    return markdown


def _table(match: re.Match[str]) -> str:
    if match[1] not in TABLES:
        raise PluginError(f"{match[0]}: there is no such table; there are {', '.join(TABLES)}")
    return TABLES[match[1]]()


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Replace the script that the theme would load from another host."""
    return output.replace(REMOTE_SCRIPT, get_relative_url(LOCAL_SCRIPT, page.url))


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """Do the same for the page that a server shows in place of a missing one."""
    return output_content.replace(REMOTE_SCRIPT, f"/{LOCAL_SCRIPT}")
