"""Version checks for the hardware-free tests, and a fixture that runs one script in a new process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import TIMEOUT

ROOT = Path(__file__).parents[2]
TORCH_NPU = Path(sys.prefix) / "torch_npu"
PINNED = {"torch": "2.13.0", "triton": "3.7.1", "torch_npu": "2.13.0"}
"""The tests replace private functions of these packages, so they run with exactly these versions."""


def _version(package: str) -> str:
    if package == "torch_npu":  # unpacked beside the environment by the Makefile, never installed into it
        found = [path.name.split("-")[1] for path in TORCH_NPU.glob("torch_npu-*.dist-info")]
        return (found or ["none"])[0].removesuffix(".dist")
    try:
        return version(package).split("+")[0]
    except PackageNotFoundError:
        return "none"


def require(*packages: str) -> None:
    """Skip the test if an installed version is not the pinned one; fail instead if NO_SKIPS is set, as in CI."""
    other = [f"{name} {_version(name)}" for name in packages if _version(name) != PINNED[name]]
    if other:
        wanted = ", ".join(f"{name} {PINNED[name]}" for name in packages)
        (pytest.fail if os.environ.get("NO_SKIPS") else pytest.skip)(
            f"replaces private parts of {wanted}; here is {', '.join(other)}"
        )


@pytest.fixture(scope="session")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return a function that runs a script of this folder and parses its output as JSON; a failure shows stderr."""

    def run(script: str, *arguments: str, **environment: str) -> Any:
        cache = str(tmp_path_factory.mktemp(script))
        settings = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache, **environment}
        command = [sys.executable, "-W", "ignore", "-m", f"tests.hardware_free.{script}", *arguments]
        result = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True, timeout=TIMEOUT
        )
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    return run
