"""Faults of the cache directory and of the C++ compiler: compile again where that helps, else name the cause.

Inductor writes a file only if none exists at its path, and it does not check a file that exists. So a file that a full
disk or a killed process has left damaged would make every later process fail. Here, damaged libraries are removed
before a compilation, because loading one can end the process. Damaged modules are removed after a failure.

Limit: a library of Inductor with wrong bytes, but of the right length, is not found. Units that use such a library are
verified as all others are.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CalledProcessError
from typing import TypeVar

from compiled_optim.backends import disk_cache
from compiled_optim.errors import BackendUnavailableError, RuleError, first_line
from compiled_optim.torch_private import unsupported

T = TypeVar("T")

EAGER = "pass compile=False to run the same step eagerly"
COMPILER_REMEDY = (
    "install a C++ compiler (for example the packages g++ and python3-dev) or name one in the environment variable "
    f"CXX, or {EAGER}"
)
BROKEN_COMPILER_REMEDY = (
    "check that the compiler works and finds Python's headers (package python3-dev), or name another one in the "
    f"environment variable CXX, or {EAGER}"
)

DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""Errors that a compiler may report when it writes its output."""

NO_DISK_FAULTS = (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)
"""Errors of the operating system that have nothing to do with the cache directory."""

MAX_OUTPUT = 2000
"""The number of characters of a compiler's output that a message contains."""


def compile_safely(compile: Callable[[], T]) -> T:
    """Return the result of ``compile()``; raise BackendUnavailableError with the cause and the remedy if it fails.

    If there are damaged files in the cache directory, they are removed and ``compile`` is called again.
    """
    # before Inductor is imported: if that fails because of the directory, it cannot be imported later either
    disk_cache.check_writable()
    remove_damaged_libraries()
    with described_errors():
        check_path()
        try:
            return compile()
        except (BackendUnavailableError, RuleError):
            raise
        except Exception as error:
            if is_disk_fault(error) or not remove_damaged_modules():
                raise
        return compile()


@contextmanager
def described_errors() -> Iterator[None]:
    """Raise BackendUnavailableError with the cause and the remedy instead of an error of the compiler."""
    try:
        yield
    except (BackendUnavailableError, RuleError):
        raise
    except Exception as error:
        raise describe(error) from error


def describe(error: Exception) -> BackendUnavailableError:
    """Return the error for a failed compilation: its cause and the remedy."""
    from compiled_optim.torch_private import exc

    cause = getattr(error, "inner_exception", error)
    if isinstance(cause, OSError) and cause.errno not in NO_DISK_FAULTS:
        return disk_cache.unusable(cause)
    if isinstance(cause, exc.InvalidCxxCompiler):
        return BackendUnavailableError(f"the C++ compiler does not work: {cause}\n{COMPILER_REMEDY}")
    if isinstance(cause, exc.CppCompileError | CalledProcessError):
        output = _output(cause)
        for number in DISK_FAULTS:
            line = next((line for line in output.splitlines() if os.strerror(number) in line), None)
            if line is not None:
                return disk_cache.unusable(OSError(number, f"the C++ compiler reports: {line}"))
        reason = _errors(output) or "it printed nothing; it may have been killed, for example for lack of memory"
        return BackendUnavailableError(f"the C++ compiler failed: {reason}\n{BROKEN_COMPILER_REMEDY}")
    if isinstance(cause, ImportError) and ".so" in str(cause):
        return BackendUnavailableError(
            f"a compiled library cannot be loaded ({first_line(cause)}); if the disk is mounted with noexec, set the "
            f"environment variable TORCHINDUCTOR_CACHE_DIR to a directory on another one; else {BROKEN_COMPILER_REMEDY}"
        )
    return BackendUnavailableError(unsupported(cause))


def is_disk_fault(error: Exception) -> bool:
    """Return True if a compilation failed because a file could not be written."""
    cause = getattr(error, "inner_exception", error)
    texts = map(os.strerror, DISK_FAULTS)
    return isinstance(cause, OSError) or any(text in _output(cause) for text in texts)


def _output(cause: BaseException) -> str:
    output = getattr(cause, "output", None) or ""
    return (output.decode(errors="replace") if isinstance(output, bytes) else str(output)).strip()


def _errors(output: str) -> str:
    """Return the output of a compiler from its first error on, or its end. Warnings may surround an error."""
    error = re.search(r"^.*\berror: ", output, re.MULTILINE)
    start = error.start() if error else max(0, len(output) - MAX_OUTPUT)
    return output[start : start + MAX_OUTPUT]


def check_path() -> None:
    """Raise if the path of the cache directory contains characters that Inductor's C++ builder does not quote."""
    from compiled_optim.torch_private import BuildOptionsBase, CppBuilder

    place = disk_cache.directory().as_posix()
    source = f"{place}/i.cpp"
    builder = CppBuilder(name="o", sources=[source], BuildOption=BuildOptionsBase(), output_dir=place)
    try:
        is_quoted = source in shlex.split(builder.get_command_line())
    except ValueError:  # a single quotation mark
        is_quoted = False
    if not is_quoted:
        raise BackendUnavailableError(
            f"the path of Inductor's cache directory contains a space or a quotation mark, which torch does not pass "
            f"to the C++ compiler correctly: {place}; set the environment variable TORCHINDUCTOR_CACHE_DIR to a path "
            f"without them, or {EAGER}"
        )


def is_complete(library: Path) -> bool:
    """Return True if a library exists and has the length that its header claims. Loading a shorter one can crash.

    Elsewhere than on Linux, where libraries are not ELF files, only the existence is checked.
    """
    if sys.platform != "linux":
        return library.exists()
    try:
        size = library.stat().st_size
        with library.open("rb") as file:
            header = file.read(64)
    except OSError:
        return False
    if len(header) < 64 or not header.startswith(b"\x7fELF"):
        return False
    order = "<" if header[5] == 1 else ">"
    # the table of sections, which linkers write last: its offset, the size of an entry and the number of entries
    (offset,) = struct.unpack_from(f"{order}Q", header, 0x28)
    entry, count = struct.unpack_from(f"{order}HH", header, 0x3A)
    return bool(offset + entry * count <= size)


def remove_damaged_libraries() -> None:
    """Remove Inductor's own libraries that are incomplete, except those that a process is writing now."""
    if sys.platform != "linux":
        return
    import fcntl

    for library in disk_cache.directory().glob("??/*.so"):
        if is_complete(library):
            continue
        lock = disk_cache.directory() / "locks" / f"{library.name.partition('.')[0]}.lock"
        try:
            with lock.open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which Inductor holds while it builds a library
                library.unlink(missing_ok=True)
        except OSError:
            continue


def remove_damaged_modules() -> int:
    """Remove generated Python modules whose contents have changed; return their number."""
    from compiled_optim.torch_private import PyCodeCache, code_hash

    removed = 0
    for module in disk_cache.directory().glob("??/c*.py"):
        try:
            text = module.read_text(errors="replace")
            if code_hash(text.strip()) != module.stem:  # a module is named after its contents
                module.unlink(missing_ok=True)
                PyCodeCache.modules_no_attr.pop(str(module), None)
                removed += 1
        except OSError:
            continue
    return removed
