"""The examples that need a framework run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["hf_trainer.py", "lightning_module.py"])
def test_example(name, tmp_path):
    result = subprocess.run(
        [sys.executable, str(FOLDER / name)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "AdamW, compiled (cpu)" in result.stdout
    assert "at the end" in result.stdout
