"""Check that a release is ready: ``python .ci/check_release.py v1.2.3`` compares the tag with the project."""

import re
import sys
import tomllib
from pathlib import Path

tag = sys.argv[1]
project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
version = project["version"]
problems = []
if tag != f"v{version}":
    problems.append(f"the tag is {tag}, but the version in pyproject.toml is {version}: it must be v{version}")
if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", Path("CHANGELOG.md").read_text(), re.MULTILINE):
    problems.append(f"CHANGELOG.md has no section `## [{version}] - <date>`")
if f"\nversion: {version}\n" not in Path("CITATION.cff").read_text():
    problems.append(f"CITATION.cff does not have `version: {version}`")
reserved = [name for name, address in project["urls"].items() if ".example" in address]
if reserved:
    problems.append(f"project.urls in pyproject.toml has reserved addresses: {', '.join(reserved)}")
print("\n".join(problems) or f"{tag} can be released")
sys.exit(bool(problems))
