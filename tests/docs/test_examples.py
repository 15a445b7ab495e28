"""The examples: each runs in a process of its own, and the list of them is complete."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from compiled_optim.diagnostics.units import COMPILED
from tests.helpers import TIMEOUT

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"
IN_FRAMEWORKS = {"hf_trainer.py", "lightning_module.py"}
"""Run by tests/frameworks, which has the packages that they need."""

RUNS = {
    "plain_loop.py": ([], "torch.optim.AdamW has continued from the checkpoint"),
    "custom_rule.py": ([], "AdaBelief, compiled (cpu): 4 tensors"),
    "eight_bit_gpt.py": (["--steps", "30"], "instead of 8 in float32"),
    "torch_npu_migration.py": (["--test-device"], 'with on_realloc="raise": 4 parameters were reallocated'),
}
"""Arguments, and a line that the example prints."""


def run(*words: str, **environment: str) -> str:
    """Run Python with one thread from another directory, and return what it prints."""
    result = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("name", RUNS)
def test_examples_run(name):
    arguments, line = RUNS[name]
    assert line in run(str(FOLDER / name), *arguments)


def test_fsdp2_runs_on_two_ranks():
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(FOLDER / "fsdp2.py")]
    printed = run(*words, GLOO_SOCKET_IFNAME="lo")
    assert "rank 0 of 2: loss" in printed
    assert "rank 1 of 2: loss" in printed
    assert "has (32, 16) of the first weight" in printed
    assert "saved and loaded a checkpoint" in printed


def test_muon_runs():
    assert "Muon" in run(str(FOLDER / "muon.py"))


def commands(text: str) -> dict[str, list[str]]:
    """Return the arguments of the instructions of a Containerfile, with continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", text)
    found: dict[str, list[str]] = {}
    for line in joined.splitlines():
        if line and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            found.setdefault(word, []).append(rest)
    return found


def test_the_image_starts_warm(tmp_path):
    """Run the warm-up of the Containerfile, then the script of its second stage, which has no compiler."""
    steps = commands((FOLDER / "Containerfile").read_text())
    warmup = steps["RUN"][1].partition(" && ")[2]
    assert warmup.startswith("python -m compiled_optim warmup ")
    words = warmup.replace("float32,bfloat16", "float32").split()[1:]
    assert COMPILED in run(*words, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    script = ast.literal_eval(steps["CMD"][0])[-1]
    path = FOLDER / Path(script).name
    printed = run(str(path), TORCHINDUCTOR_CACHE_DIR=str(tmp_path), PATH="", CXX="/nowhere/g++")
    assert "AdamW[float32, table]: disk cache" in printed
    assert "imported: none" in printed


def test_the_containerfile_is_consistent():
    """Check what a build would: known instructions, files that exist, and paths that both stages share."""
    steps = commands((FOLDER / "Containerfile").read_text())
    assert steps.keys() == {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "CMD"}
    assert steps["FROM"] == ["python:${PYTHON} AS compiled", "python:${PYTHON}"]
    own = [words.split() for words in steps["COPY"] if not words.startswith("--from=compiled ")]
    assert all((ROOT / source).exists() for *sources, _ in own for source in sources)
    assert [words for words in own if words[0] != "."] == [["examples/warm_start.py", "/srv/"]]
    (cache,) = set(steps["ENV"])
    folder = cache.partition("=")[2]
    assert f"--from=compiled {folder}/ {folder}/" in steps["COPY"]
    for script in steps["RUN"]:
        subprocess.run(["sh", "-n", "-c", script], check=True)


def test_the_list_of_examples_is_complete():
    scripts = {path.name for path in FOLDER.glob("*.py")}
    assert scripts == {*RUNS, *IN_FRAMEWORKS, "fsdp2.py", "muon.py", "warm_start.py"}
    listed = set(re.findall(r"\]\((\w+(?:\.py)?)\)", (FOLDER / "README.md").read_text()))
    assert listed == {*scripts, "Containerfile"}
    frameworks = (ROOT / "tests" / "frameworks" / "test_examples.py").read_text()
    assert all(name in frameworks for name in IN_FRAMEWORKS)


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.py")))
def test_the_docstring_tells_how_to_run_it(name):
    text = ast.get_docstring(ast.parse((FOLDER / name).read_text()))
    assert text is not None
    assert f"examples/{name}" in text
