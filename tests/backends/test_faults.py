"""Faults of the cache directory and of the compiler: a unit is compiled again, or the message names the real cause."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor import config
from torch._inductor.exc import CppCompileError

import compiled_optim as co
from compiled_optim.backends import cpu, disk_cache, faults, libraries
from tests.helpers import run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="damages ELF files, and calls the compiler by a script")

STEPS = """
import logging, sys, torch, compiled_optim as co

class Own(co.Optimizer):  # has no record, and runs over a table
    def __init__(self, params, lr=0.25):
        super().__init__(params, {"lr": lr})

    @staticmethod
    def update(p, g, *, lr):
        p -= lr * g

class Mean(Own):  # runs one tensor at a time, with a library of Inductor
    @staticmethod
    def update(p, g, *, lr):
        for param, grad in zip(p, g):
            param -= lr * grad / grad.mean()

logging.getLogger("compiled_optim").addHandler(logging.StreamHandler(sys.stdout))
made = {"AdamW": lambda params: co.AdamW(params, lr=0.25, weight_decay=0), "Own": Own, "Mean": Mean}
for name in NAMES:
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    try:
        optimizer = made[name]([param])
        optimizer.step()
        assert param.tolist() == [0.75] * 3, param
        print(name, *(unit.source for unit in optimizer.explain().units))
    except co.BackendUnavailableError as error:
        assert param.tolist() == [1.0] * 3, param
        print(name, "failed:", error)
"""
COMPILED, LOADED = "compiled now", "disk cache"


def steps(cache: Path, *names: str, **environment: str) -> list[str]:
    """Make the first step of optimizers in a new process; return what it printed."""
    code = STEPS.replace("NAMES", repr(names))
    return run_python(code, TORCHINDUCTOR_CACHE_DIR=str(cache), **environment).splitlines()


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> Path:
    """Return a cache directory with the files of all three optimizers."""
    cache = tmp_path_factory.mktemp("filled")
    assert steps(cache, "AdamW", "Own", "Mean") == [f"{name} {COMPILED}" for name in ("AdamW", "Own", "Mean")]
    return cache


@pytest.fixture
def cache(filled, tmp_path) -> Path:
    """Return a copy of the filled cache directory without the record of AdamW and without libraries of units."""
    cache = tmp_path / "cache"
    shutil.copytree(filled, cache)
    shutil.rmtree(cache / "compiled_optim")
    return cache


# ---- damaged files of Inductor; test_compile_cost.py damages those of this package


def empty(path):
    path.write_bytes(b"")


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def shorten(path):
    path.write_bytes(path.read_bytes()[:3000])  # loading it ends the process with SIGBUS


def scribble(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3 : len(content) // 3 + 4] = b"\xff((("
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("files", "damage"),
    [("??/*.py", empty), ("??/*.py", halve), ("??/*.py", scribble), ("??/*.so", empty), ("??/*.so", shorten)],
)
def test_damaged_files_of_inductor_are_made_again(files, damage, cache):
    damaged = list(cache.glob(files))
    assert len(damaged) >= 3
    for path in damaged:
        damage(path)
    assert steps(cache, "Own", "Mean", "AdamW") == [f"{name} {COMPILED}" for name in ("Own", "Mean", "AdamW")]
    assert all(map(faults.is_complete, cache.glob("??/*.so")))
    assert steps(cache, "AdamW") == [f"AdamW {LOADED}"]


def test_an_incomplete_library_is_found(filled, tmp_path):
    library = next(filled.glob("compiled_optim/*.so"))
    content = library.read_bytes()
    assert faults.is_complete(library)
    for size in (0, 3, 63, 64, 3000, len(content) // 2, len(content) - 1):
        (tmp_path / "cut.so").write_bytes(content[:size])
        assert not faults.is_complete(tmp_path / "cut.so"), size
    (tmp_path / "text.so").write_text("int main() {}\n" * 100)
    assert not faults.is_complete(tmp_path / "text.so")
    assert not faults.is_complete(tmp_path / "missing.so")


def test_a_library_that_is_being_written_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for folder in ("ab", "locks"):
        (tmp_path / folder).mkdir()
    library = tmp_path / "ab" / "cabc.main.so"
    library.write_bytes(b"\x7fELF")
    with open(tmp_path / "locks" / "cabc.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as a process does that builds this library
        faults.remove_damaged_libraries()
        assert library.exists()
    faults.remove_damaged_libraries()
    assert not library.exists()


# ---- the directory


def a_file(tmp_path):
    (tmp_path / "cache").write_text("")
    return tmp_path / "cache"


def below_a_file(tmp_path):
    return a_file(tmp_path) / "below"


def a_file_for_the_units(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "compiled_optim").write_text("")
    return tmp_path / "cache"


def read_only(tmp_path):
    return Path("/proc/sys/kernel")  # not even root can create a file there


@pytest.mark.parametrize("place", [a_file, below_a_file, a_file_for_the_units, read_only])
def test_a_directory_that_cannot_be_used_is_named(place, tmp_path):
    """The second optimizer of the process gets the same message, so Inductor was not imported in part."""
    cache = place(tmp_path)
    for name, line in zip(("AdamW", "Own"), steps(cache, "AdamW", "Own"), strict=True):
        assert line.startswith(f"{name} failed: Inductor's cache directory {cache} cannot be used: [Errno ")
        assert "; set the environment variable TORCHINDUCTOR_CACHE_DIR to a directory that can be written to" in line


@pytest.mark.parametrize("name", ["with space", "it's", 'a"b'])
def test_a_path_that_torch_does_not_quote_is_named(name, tmp_path):
    (line,) = steps(tmp_path / name, "AdamW")
    assert line.startswith("AdamW failed: the path of Inductor's cache directory contains a space or a quotation mark")
    assert f"{tmp_path / name}; set the environment variable TORCHINDUCTOR_CACHE_DIR" in line


def test_units_are_loaded_from_a_path_with_a_space(filled, tmp_path):
    shutil.copytree(filled, tmp_path / "with space")
    assert steps(tmp_path / "with space", "AdamW", CXX="no-such-compiler") == [f"AdamW {LOADED}"]


NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
FREE_SPACE = "; free space there and in the directory for temporary files, or set the environment variable"


def fail(*args, **kwargs):
    raise NO_SPACE


def fresh_optimizer():
    """Return an optimizer whose unit is neither in this process nor on disk, and its parameter."""

    class Fresh(co.Optimizer):
        def __init__(self, params, **options):
            super().__init__(params, {"lr": 0.25}, **options)

        @staticmethod
        def update(p, g, *, lr):
            p -= lr * g + 0.0625

    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    return Fresh([param], backend=cpu.CpuBackend()), param


def message_of(optimizer, param) -> str:
    """Make a step, which must fail without changing anything; return the message."""
    with pytest.raises(co.BackendUnavailableError) as caught:
        optimizer.step()
    assert param.tolist() == [1.0] * 3
    assert not optimizer.state
    return str(caught.value)


@pytest.mark.parametrize("where", ["tempfile.TemporaryFile", "torch._inductor.codecache.write_atomic"])
def test_a_full_disk_is_named(where, cache, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    optimizer, param = fresh_optimizer()
    monkeypatch.setattr(where, fail)
    message = message_of(optimizer, param)
    assert message.startswith(f"Inductor's cache directory {cache} cannot be used: [Errno 28] No space left on device")
    assert FREE_SPACE in message
    assert "install" not in message
    monkeypatch.undo()
    optimizer.step()
    assert param.tolist() == [0.6875] * 3


# ---- the compiler

COMPILER = """#!/usr/bin/env bash
# Fail while the file FAULT exists: only for libraries of units, or (PROBES) only for tests of instruction sets.
for last; do [ "$previous" = -o ] && output=$last; previous=$last; done
case "$output" in "") exec g++ "$@";; */compiled_optim/*) unit=1;; *) unit=;; esac
if [ ! -e "$FAULT" ] || [ "${PROBES:-}" = "$unit" ]; then exec g++ "$@"; fi
%s
"""
FAULTS = {
    "error": ("echo 'cc1plus: out of memory'; exit 1", "the C++ compiler failed: cc1plus: out of memory"),
    "killed": ("kill -9 $$", "the C++ compiler failed: it printed nothing; it may have been killed"),
    "disk full": (
        "echo '/usr/bin/ld: final link failed: No space left on device'; exit 1",
        "Inductor's cache directory CACHE cannot be used: [Errno 28] the C++ compiler reports: /usr/bin/ld: final link",
    ),
    "no library": ("exit 0", "the C++ compiler reported no error, but the library that it wrote to CACHE/compiled_o"),
    "empty library": (': > "$output"', "the C++ compiler reported no error, but the library that it wrote to CACHE"),
    "cut library": (
        'g++ "$@" && truncate -s 3000 "$output"',
        "the C++ compiler reported no error, but the library that it wrote to CACHE/compiled_optim is incomplete (3000",
    ),
    "no library, but ELF": (
        'g++ "$@" && printf "\\xff" | dd of="$output" bs=1 seek=16 conv=notrunc status=none',
        "a compiled library cannot be loaded (CACHE/compiled_optim/",
    ),
}


def write_compiler(path: Path, fault: str) -> None:
    path.write_text(COMPILER % fault)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_compiler_that_fails_half_way(fault, cache, monkeypatch, tmp_path):
    """The cause is named, and the next step compiles again: nothing of the failure is kept."""
    action, expected = FAULTS[fault]
    write_compiler(tmp_path / "compiler", action)
    (tmp_path / "fault").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    monkeypatch.setenv("FAULT", str(tmp_path / "fault"))
    optimizer, param = fresh_optimizer()
    with config.patch({"cpp.cxx": (str(tmp_path / "compiler"),)}):  # CXX is read when Inductor is imported
        message = message_of(optimizer, param)
    assert message.startswith(expected.replace("CACHE", str(cache)))
    assert (FREE_SPACE if fault == "disk full" else "check that the compiler works") in message
    assert "pass compile=False to run the same step eagerly" in message
    assert "install a C++ compiler" not in message
    (tmp_path / "fault").unlink()
    with config.patch({"cpp.cxx": (str(tmp_path / "compiler"),)}):
        optimizer.step()
    assert param.tolist() == [0.6875] * 3


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in libraries.VECTOR_BITS, reason="torch uses no AVX here"
)
def test_code_without_vectors_is_not_kept(tmp_path):
    """A compiler that failed in Inductor's test of AVX would make this unit slower for all later processes."""
    write_compiler(tmp_path / "compiler", "exit 1")
    (tmp_path / "fault").touch()
    environment = {"CXX": str(tmp_path / "compiler"), "FAULT": str(tmp_path / "fault"), "PROBES": "1"}
    warning, line = steps(tmp_path / "cache", "AdamW", **environment)
    assert warning.startswith(
        f"Inductor cannot use {torch.backends.cpu.get_cpu_capability()}, because its test of these"
    )
    assert line == f"AdamW {COMPILED}"
    assert not list(tmp_path.glob("cache/compiled_optim/*.json"))
    assert not (tmp_path / "cache" / "fxgraph").exists(), "Inductor would take the slow code from there"
    (tmp_path / "fault").unlink()
    assert steps(tmp_path / "cache", "AdamW", **environment) == [f"AdamW {COMPILED}"]
    assert steps(tmp_path / "cache", "AdamW", **environment) == [f"AdamW {LOADED}"]


def test_units_on_disk_but_no_compiler(filled):
    """A unit that is not on disk needs the compiler, although others can be loaded without it."""
    loaded, failed, *_ = steps(filled, "AdamW", "Own", CXX="no-such-compiler")
    assert loaded == f"AdamW {LOADED}"
    assert failed.startswith("Own failed: the C++ compiler does not work: No working C++ compiler found")


def test_any_other_error_of_the_compiler_names_the_version_of_torch(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def changed(*args, **kwargs):
        raise TypeError("compile_fx() got an unexpected keyword argument 'config_patches'")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", changed)
    message = message_of(*fresh_optimizer())
    assert message.startswith(f"torch {torch.__version__} failed to compile the step (TypeError: compile_fx() got an")
    assert "tested with torch 2.12 to 2.15; pass compile=False to run the same step eagerly" in message


def test_the_check_of_the_directory_leaves_no_file(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "new" / "cache"))
    disk_cache.check_writable()
    assert list((tmp_path / "new" / "cache").rglob("*")) == [tmp_path / "new" / "cache" / "compiled_optim"]


def test_an_error_between_warnings_is_named():
    """A compiler that fails in generated code prints thousands of warnings about headers around its error."""
    warnings = "vec512.h:12: warning: overflow in conversion\n" * 200
    output = f"{warnings}unit.cpp:3:7: error: 'x' was not declared\n{warnings}"
    text = str(faults.describe(CppCompileError(["g++"], output)))
    assert "the C++ compiler failed: unit.cpp:3:7: error: 'x' was not declared" in text
