"""Tests of the files around the package: README, changelog, version, commands, releases, correctness matrix."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import compiled_optim as co
from catalog import ALL, matrix

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))


def test_the_readme_takes_two_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_there_is_one_version():
    assert co.__version__ == PROJECT["version"]
    assert f"\nversion: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_changelog_has_the_usual_form():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE)[0] == "[Unreleased]"
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_sources_that_are_not_installed_say_what_to_do(tmp_path):
    """After `pip install .`, Python inside a clone finds the sources, where backends/ is not a part of the package."""
    shutil.copytree(ROOT / "compiled_optim", tmp_path / "compiled_optim")
    without_editable = "import sys; sys.meta_path = [each for each in sys.meta_path if 'editable' not in repr(each)]"
    command = [sys.executable, "-c", f"{without_editable}; import compiled_optim"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "ImportError: compiled_optim is imported from its source directory" in result.stderr
    assert "pip install -e ." in result.stderr


# ---- commands


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w.$()/-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)) | {".venv/.ready"}


def unknown_commands(text: str) -> list[str]:
    """Return the make targets, modules and test files that a text names and that do not exist."""
    targets = re.findall(r"(?:^|`|run: )make (?:PYTHON=\S+ )?([a-z.][\w./-]*)", text, re.MULTILINE)
    modules = re.findall(r"python -m ([a-z][\w.]*)", text)
    files = re.findall(r"\b((?:tests|perf|website|catalog|\.ci)/[\w./]+\w)", text)
    found = [f"make {target}" for target in targets if target not in make_targets()]
    installed = re.findall(r"pip install (\w+)==", text)
    unknown = [module for module in modules if module not in installed and importlib.util.find_spec(module) is None]
    found += [f"python -m {module}" for module in unknown]
    return [*found, *(file for file in files if not (ROOT / file).exists())]


@pytest.mark.parametrize("page", [*PAGES, *WORKFLOWS], ids=lambda page: page.name)
def test_commands_and_files_on_pages_exist(page):
    assert unknown_commands(page.read_text()) == []


def test_a_command_that_does_not_exist_is_found():
    text = "`make test`, `make tee`, `python -m perf.guard`, `python -m perf.nothing`, tests/nothing.py, tests/docs"
    text += "\npip install tool==1 && python -m tool"
    assert unknown_commands(text) == ["make tee", "python -m perf.nothing", "tests/nothing.py"]


def test_actions_are_pinned_by_full_versions():
    used = [each for path in WORKFLOWS for each in re.findall(r"uses: (\S+)", path.read_text())]
    assert used
    assert [each for each in used if not re.fullmatch(r"[\w./-]+@(v\d+\.\d+\.\d+|[0-9a-f]{40})", each)] == []


# ---- releases


@pytest.fixture
def project(tmp_path):
    for name in ("pyproject.toml", "CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def check_release(folder: Path, tag: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / ".ci/check_release.py", tag]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_release_that_is_not_ready_is_refused(project):
    result = check_release(project, "v99.0.0")
    assert result.returncode == 1
    assert "the tag is v99.0.0" in result.stdout


def test_a_release_that_is_ready_passes(project):
    version = PROJECT["version"]
    settings, changes = project / "pyproject.toml", project / "CHANGELOG.md"
    settings.write_text(settings.read_text().replace(".example", ".org"))
    changes.write_text(changes.read_text().replace("## [Unreleased]", f"## [{version}] - 2026-12-01"))
    result = check_release(project, f"v{version}")
    assert (result.returncode, result.stdout) == (0, f"v{version} can be released\n")


# ---- the correctness matrix


def test_the_matrix_is_up_to_date():
    """If it fails: make matrix."""
    sections = re.split(r"^## ", matrix.PAGE.read_text(), flags=re.MULTILINE)[2:]
    found = {section.split("\n")[0]: re.findall(r"^\| (\S.*?) \| +\d", section, re.MULTILINE) for section in sections}
    expected = {name: [matrix.call(o) for o in matrix.option_sets(entry)] for name, entry in ALL.items()}
    assert found == expected, "run `make matrix`"


@pytest.mark.parametrize("name", ALL)
def test_differences_are_within_the_tolerances(name):
    entry = ALL[name]
    for dtype, tolerance in zip((torch.float64, torch.float32), entry.tolerance, strict=True):
        difference = matrix.difference(entry, entry.typical, dtype, compiled=False, shapes=matrix.shapes_of(entry))
        assert difference is not None
        assert difference <= tolerance


def test_a_wrong_result_shows_in_the_matrix(monkeypatch):
    entry = ALL["AdamW"]
    right = matrix.difference(entry, {}, torch.float32, compiled=False)
    monkeypatch.setattr(co, "AdamW", co.Adam)
    assert matrix.difference(entry, {"weight_decay": 0.1}, torch.float32, compiled=False) > 1e3 * right


def test_refused_options_are_named_in_the_matrix():
    refused = matrix.difference(ALL["AdamW"], {}, torch.float32, compiled=False, stored={"rounding": "up"})
    assert refused is None
    assert matrix.written(refused) == "refused"
