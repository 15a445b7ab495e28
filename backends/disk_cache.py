"""Compiled units on disk, found without the compiler.

A signature holds everything a unit depends on, so records are keyed by the signature. A record names a library in the
same directory and its digest. Loading needs neither tracing nor Inductor: a process with all units on disk does not
import it, and the directory may be read-only. A unit whose record or library is damaged is compiled again. A record
that cannot be written is left out; a library that cannot be written is an error. Loaded units are verified like new
ones.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from compiled_optim import program
from compiled_optim.backends.base import Signature
from compiled_optim.errors import BackendUnavailableError
from compiled_optim.locations import is_ours
from compiled_optim.torch_private import changed_settings, default_cache_directory

FOLDER = "compiled_optim"

UNIT_BYTES = 1 << 20
"""An upper bound of the space that Inductor's files and the library of a unit take."""

VARIABLES_WITHOUT_EFFECT = ("CACHE_DIR", "COMPILE_THREADS", "FORCE_DISABLE_CACHES", "WORKER_START")
"""Environment variables of Inductor, without their prefix, that do not change the code it generates."""


def load(signature: Signature, settings: Mapping[str, Any]) -> tuple[Path, dict[str, Any]] | None:
    """Return the library of a unit and its record, or None if there is none or it is damaged."""
    if not _is_cacheable(signature):
        return None
    try:
        record = json.loads(_path(signature, settings).read_text())
        library = directory() / FOLDER / Path(record["library"]).name
        return (library, dict(record["unit"])) if digest_of(library) == record["digest"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save(signature: Signature, settings: Mapping[str, Any], library: Path, unit: Mapping[str, Any]) -> None:
    """Write the record of a unit for :func:`load`. ``unit`` describes the unit, in JSON."""
    if not _is_cacheable(signature):
        return
    try:
        about = {"library": library.name, "digest": digest_of(library), "made_by": environment_digest()}
        record = {**about, "unit": unit}
        write(_path(signature, settings), json.dumps(record))
    except OSError:
        return


def digest_of(path: Path) -> str:
    """Return the digest of the contents of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def has_digest(path: Path, digest: Path) -> bool:
    """Return True if a file has the contents whose digest was written to another file."""
    try:
        return digest.read_text() == digest_of(path)
    except (OSError, ValueError):
        return False


def write(path: Path, text: str) -> None:
    """Write a file at once: no other process sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    draft.write_text(text)
    draft.replace(path)


def contains(signature: Signature, settings: Mapping[str, Any]) -> bool:
    """Return True if there is a record for this signature."""
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
    """Return Inductor's cache directory, without importing Inductor. It need not exist."""
    found = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return Path(found if found is not None else default_cache_directory()).resolve()


def create_directory() -> None:
    """Create the cache directory if it does not exist, as Dynamo does when it is imported; raise if that fails."""
    try:
        directory().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unusable(error) from error


def check_writable() -> None:
    """Raise if no unit can be written to the cache directory."""
    create_directory()
    folder = directory() / FOLDER
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(UNIT_BYTES))
    except OSError as error:
        raise unusable(error) from error


def unusable(error: OSError) -> BackendUnavailableError:
    """Return the error for a cache directory that cannot be written to."""
    remedy = "set the environment variable TORCHINDUCTOR_CACHE_DIR to a directory that can be written to"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = (
            "free space there and in the directory for temporary files, or set the environment variable "
            "TORCHINDUCTOR_CACHE_DIR to a directory on another disk"
        )
    return BackendUnavailableError(
        f"Inductor's cache directory {directory()} cannot be used: {error}; {remedy}, or pass compile=False to run "
        "the same step eagerly"
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
    """Return the path of a unit's record. Its name is a digest of everything the generated code depends on."""
    rule = _rule(signature)
    parts = (
        environment_digest(),
        _inductor_settings(),
        f"{rule.__module__}.{rule.__qualname__}",
        repr([signature.dtypes, signature.arguments, signature.rank, signature.lane, signature.device]),
        repr([value for name, value in vars(signature.program).items() if name not in ("name", "update")]),
        repr(sorted(settings.items())),
    )
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    return directory() / FOLDER / f"{digest.hexdigest()}.json"


def _inductor_settings() -> str:
    """Return the settings of Inductor that this process has changed, by code or by the environment."""
    prefix = "TORCHINDUCTOR_"
    ignored = {prefix + name for name in VARIABLES_WITHOUT_EFFECT}
    variables = sorted((k, v) for k, v in os.environ.items() if k.startswith(prefix) and k not in ignored)
    changed = changed_settings()
    return repr(variables) + (repr(changed) if changed else "")


@lru_cache
def environment_digest() -> str:
    """Return a digest of the versions of torch and Python, the CPU type and the source of this package."""
    parts = (torch.__version__, torch.version.git_version, sys.version, platform.machine())
    digest = hashlib.sha256(repr((*parts, torch.backends.cpu.get_cpu_capability(), _cpu_flags())).encode())
    folders = {Path(program.__file__).parent, Path(__file__).parent}
    files = {path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".cpp")}
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _cpu_flags() -> str:
    """Return the instruction sets of the CPU, for which libraries are built; an empty text if unknown."""
    try:
        with open("/proc/cpuinfo") as file:
            return next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""
