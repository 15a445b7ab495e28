"""Inductor's C++ header, precompiled for a process that builds many libraries.

Parsing the header takes most of the time in which a library is built, and precompiling it takes about as long as
building three. So a process builds its first libraries without it. The precompiled header stays in the cache directory
for later processes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from compiled_optim.backends import disk_cache

logger = logging.getLogger("compiled_optim")

HEADER = "torch/csrc/inductor/cpp_prefix.h"

LIBRARIES_BEFORE = 3
"""How many libraries a process builds before it precompiles the header."""

_wanted = 0
"""For how many libraries this process has wanted the header; negative if precompiling it has failed."""


def precompiled_header(command: str, **options: Any) -> Path | None:
    """Return the header to include, or None if it is not precompiled, and not worth it yet.

    Args:
        command: the compiler's command line, on which a precompiled header depends.
        options: the arguments of CppTorchDeviceOptions.
    """
    global _wanted
    if torch.compiler.config.force_disable_caches:
        return None
    # a compiler ignores a precompiled header that another version of it, or one for another processor, has made
    digest = hashlib.sha256(f"{command}\n{torch.version.git_version}".encode()).hexdigest()
    header = disk_cache.directory() / disk_cache.FOLDER / f"{digest}.h"
    if header.exists():
        return header
    if _wanted < 0:
        return None
    _wanted += 1
    if _wanted <= LIBRARIES_BEFORE:
        return None
    try:
        _precompile(header, options)
    except Exception as error:  # libraries are built without it
        logger.debug("cannot precompile %s: %s", HEADER, error)
        _wanted = -1
        return None
    return header


def _precompile(header: Path, options: dict[str, Any]) -> None:
    """Write a header that includes HEADER, and beside it its precompiled form, which compilers prefer."""
    from compiled_optim.torch_private import CppBuilder, CppTorchDeviceOptions

    text = f"#include <{HEADER}>\n"
    with tempfile.TemporaryDirectory(dir=header.parent) as place:
        source = Path(place) / header.name
        source.write_text(text)
        builder = CppBuilder(
            name=str(source), sources=[str(source)], BuildOption=CppTorchDeviceOptions(**options, precompiling=True)
        )
        builder.build()
        made = Path(builder.get_target_file_path())
        os.replace(made, header.with_name(made.name))
    disk_cache.write(header, text)  # last, because it says that the precompiled form is complete
