"""A cache of compiled graphs on disk that needs no tracing for a lookup.

Inductor's own cache is keyed by the traced graph. A lookup there has to trace the program and run AOTAutograd, which
takes more than a second in a new process. A signature holds everything a graph depends on, so records here are keyed by
the signature. They point to the modules that Inductor generated in its cache directory. A graph whose record cannot be
read is compiled again, and a record that cannot be written is skipped. Loaded graphs are verified like new ones.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import pickle
import platform
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from compiled_optim import program
from compiled_optim.backends.base import Signature
from compiled_optim.backends.graph import Place
from compiled_optim.errors import BackendUnavailableError
from compiled_optim.locations import is_ours

FOLDER = "compiled_optim"


def load(
    signature: Signature, settings: Mapping[str, Any]
) -> tuple[Callable[[list[Any]], Sequence[torch.Tensor]], list[Place], int] | None:
    """Return the function of a graph, the places of its inputs and its number of kernels; None without a record."""
    from torch._inductor.codecache import PyCodeCache

    if not _is_cacheable(signature):
        return None
    try:
        record = json.loads(_path(signature, settings).read_text())
        source = (directory() / record["module"]).resolve()
        source.relative_to(directory())  # raises for a record that points outside of the directory
        module = PyCodeCache.load_by_key_path(record["key"], str(source))
        return module.call, [(i, place) for i, place in record["inputs"]], record["kernels"]
    except Exception:  # a stale or damaged file may raise anything; the graph is compiled again
        return None


def save(
    signature: Signature,
    settings: Mapping[str, Any],
    run: Callable[[list[Any]], Sequence[torch.Tensor]],
    inputs: Sequence[Place],
    kernels: int,
) -> None:
    """Write the record of a graph for :func:`load`."""
    if not _is_cacheable(signature):
        return
    try:
        module = Path(inspect.getfile(run)).resolve().relative_to(directory())
        record = {
            **{"key": module.stem, "module": str(module), "inputs": list(inputs), "kernels": kernels},
            "made_by": environment_digest(),
        }
        path = _path(signature, settings)
        path.parent.mkdir(exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        draft.write_text(json.dumps(record))
        draft.replace(path)
    except (OSError, TypeError, ValueError):
        return


def contains(signature: Signature, settings: Mapping[str, Any]) -> bool:
    """Return True if :func:`load` will find a record."""
    return _is_cacheable(signature) and _path(signature, settings).exists()


def _rule(signature: Signature) -> Any:
    """Return the object that holds a program's source code: its update rule, or its class."""
    return getattr(signature.program, "update", type(signature.program))


def _is_cacheable(signature: Signature) -> bool:
    """Return True for rules of this package, unless TORCHINDUCTOR_FORCE_DISABLE_CACHES is set.

    A user's rule may depend on code that the key does not cover.
    """
    return is_ours(_rule(signature)) and not torch.compiler.config.force_disable_caches


def directory() -> Path:
    """Return Inductor's cache directory."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()).resolve()


def unusable(error: OSError) -> BackendUnavailableError:
    """Return the error for a cache directory that cannot be written to."""
    return BackendUnavailableError(
        f"Inductor's cache directory cannot be used: {error}; set the environment variable TORCHINDUCTOR_CACHE_DIR to "
        "a directory that can be written to, or pass compile=False to run the same step eagerly"
    )


def count_records() -> int:
    """Return the number of records that this process can load: those with its :func:`environment_digest`."""
    count = 0
    for path in (directory() / FOLDER).glob("*.json"):
        try:
            count += json.loads(path.read_text())["made_by"] == environment_digest()
        except (OSError, ValueError, KeyError):
            continue
    return count


def _path(signature: Signature, settings: Mapping[str, Any]) -> Path:
    """Return the path of a graph's record. Its name is a digest of everything the generated code depends on."""
    from torch._inductor import config

    rule = _rule(signature)
    parts = (
        environment_digest(),
        f"{rule.__module__}.{rule.__qualname__}",
        repr([signature.dtypes, signature.arguments, signature.rank, signature.lane, signature.device]),
        repr([value for name, value in vars(signature.program).items() if name not in ("name", "update")]),
        repr(sorted(settings.items())),
    )
    digest = hashlib.sha256(pickle.dumps(config.save_config_portable()))
    for part in parts:
        digest.update(str(part).encode() + b"\0")
    return directory() / FOLDER / f"{digest.hexdigest()}.json"


@lru_cache
def environment_digest() -> str:
    """Return a digest of the versions of torch and Python, the CPU type and the source of this package."""
    parts = (torch.__version__, torch.version.git_version, sys.version, platform.machine())
    digest = hashlib.sha256(repr((*parts, torch.backends.cpu.get_cpu_capability())).encode())
    folders = {Path(program.__file__).parent, Path(__file__).parent}
    files = {path for folder in folders for path in folder.rglob("*.py")}
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()
