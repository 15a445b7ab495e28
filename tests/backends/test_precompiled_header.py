"""The precompiled C++ header: when it is made, and that libraries are built with it, or without it if it failed."""

from __future__ import annotations

import pytest
import torch

from compiled_optim.backends import disk_cache, libraries, precompiled_header


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the folder of libraries, in an empty cache directory, of a process that has built none."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(precompiled_header, "_wanted", 0)
    return tmp_path / disk_cache.FOLDER


def source(number):
    return f"#include <{precompiled_header.HEADER}>\nint answer = {number};\n"


def test_a_process_that_builds_many_libraries_precompiles_the_header(folder):
    for number in range(precompiled_header.LIBRARIES_BEFORE):
        libraries.build(source(number))
    assert not list(folder.glob("*.h"))
    libraries.build(source(precompiled_header.LIBRARIES_BEFORE))
    (header,) = folder.glob("*.h")
    header.write_text("#error only the precompiled form is read\n")
    assert libraries.build(source(-1)).exists()
    assert [path.name for path in folder.glob(f"{header.name}*")] != [header.name]


def test_a_header_of_an_earlier_process_is_used_at_once(folder, monkeypatch):
    monkeypatch.setattr(precompiled_header, "LIBRARIES_BEFORE", 0)
    libraries.build(source(0))
    (header,) = folder.glob("*.h")
    header.write_text("#error only the precompiled form is read\n")
    monkeypatch.setattr(precompiled_header, "_wanted", 0)
    monkeypatch.setattr(precompiled_header, "LIBRARIES_BEFORE", 3)
    assert libraries.build(source(1)).exists()


def test_libraries_are_built_without_a_header_that_cannot_be_precompiled(folder, monkeypatch):
    tried = []

    def fail(*_):
        tried.append(1)
        raise OSError("no space left on device")

    monkeypatch.setattr(precompiled_header, "LIBRARIES_BEFORE", 0)
    monkeypatch.setattr(precompiled_header, "_precompile", fail)
    for number in range(2):
        assert libraries.build(source(number)).exists()
    assert len(tried) == 1
    assert not list(folder.glob("*.h"))


def test_no_header_is_kept_if_caches_are_disabled(folder, monkeypatch):
    monkeypatch.setattr(precompiled_header, "LIBRARIES_BEFORE", 0)
    with torch.compiler.config.patch(force_disable_caches=True):
        libraries.build(source(0))
    assert not list(folder.glob("*.h"))
