"""Build C++ libraries with Inductor's builder, and load them."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import tempfile
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import is_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_optim.backends import disk_cache
from compiled_optim.backends.faults import BROKEN_COMPILER_REMEDY, is_complete
from compiled_optim.backends.precompiled_header import precompiled_header
from compiled_optim.errors import BackendUnavailableError
from compiled_optim.torch_private import data_ptr_function

logger = logging.getLogger("compiled_optim")

MODULE = "table_unit"
"""The name under which a library initialises itself as an extension module (``PyInit_table_unit``)."""

VECTOR_BITS = {"AVX2": 256, "AVX512": 512}
"""The width of the vectors of torch's own kernels, by the name of the instruction set."""

_loaded: Any = None
"""The library that was loaded last. All have the same functions that check lists of tensors."""


@lru_cache
def has_vectors() -> bool:
    """Return False if Inductor does not use the vector instructions that torch uses, because its test of them failed.

    Inductor builds and loads a test library for each instruction set. A compiler that was killed, or a full disk, also
    makes the test fail. Then the code is slower, and must not be kept for other processes.
    """
    from compiled_optim.torch_private import config, pick_vec_isa

    capability = torch.backends.cpu.get_cpu_capability()
    if config.cpp.simdlen is not None or config.cpp.vec_isa_ok is not None:  # the user has chosen
        return True
    if pick_vec_isa().bit_width() >= VECTOR_BITS.get(capability, 0):
        return True
    logger.warning(
        "Inductor cannot use %s, because its test of these instructions could not be built or loaded: units compiled "
        "by this process are slower and are not kept on disk. Check the C++ compiler (python -m compiled_optim doctor)",
        capability,
    )
    return False


def cache_options() -> dict[str, Any]:
    """Return the option that keeps Inductor from using its cache on disk, if :func:`has_vectors` is False.

    The key of that cache does not contain the instruction set.
    """
    return {} if has_vectors() else {"force_disable_caches": True}


def build(source: str) -> Path:
    """Return the library of a C++ source; build it unless it exists."""
    from compiled_optim.torch_private import CppBuilder, CppTorchDeviceOptions, pick_vec_isa

    # as Inductor builds its kernels, except that it precompiles the header before the first of them
    given: dict[str, Any] = {"vec_isa": pick_vec_isa(), "include_pytorch": False, "shared": True, "device_type": "cpu"}
    options = CppTorchDeviceOptions(**given)
    command = CppBuilder(name="o", sources="i", BuildOption=options).get_command_line()
    name = hashlib.sha256(f"{command}\n{disk_cache.environment_digest()}\n{source}".encode()).hexdigest()
    folder = disk_cache.directory() / disk_cache.FOLDER
    library = folder / f"{name}.so"
    digest = library.with_suffix(".sha256")
    if not torch.compiler.config.force_disable_caches and disk_cache.has_digest(library, digest):
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        file = Path(place) / f"{name}.cpp"
        file.write_text(source)
        if header := precompiled_header(command, **given):
            options.precompiled_header = str(header)
        builder = CppBuilder(name=name, sources=[str(file)], BuildOption=options, output_dir=place)
        builder.build()
        target = Path(builder.get_target_file_path())
        if not is_complete(target):
            size = target.stat().st_size if target.exists() else 0
            raise BackendUnavailableError(
                f"the C++ compiler reported no error, but the library that it wrote to {folder} is incomplete "
                f"({size} bytes); check that there is space on the disk; {BROKEN_COMPILER_REMEDY}"
            )
        os.replace(target, library)  # no other process sees a part of it
    disk_cache.write(digest, disk_cache.digest_of(library))
    return library


def build_and_load(source: str) -> tuple[Path, Any]:
    """Return the library of a C++ source, and the library as a module."""
    library = build(source)
    try:
        return library, load(library)
    except ImportError:
        library.unlink(missing_ok=True)  # to build it again next time
        raise


def load(library: Path) -> Any:
    """Return a library as a module. It is not added to ``sys.modules``."""
    global _loaded
    spec = importlib.util.spec_from_file_location(MODULE, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _loaded = module
    return module


def same_memory_check(tensors: Sequence[Tensor]) -> Callable[[list[Tensor]], bool]:
    """Return a function that compares a list with ``tensors``: the same objects, in the same memory.

    It is native if a library is loaded. ``tensors`` must be plain tensors with memory.
    """
    known = list(tensors)
    if _loaded is None:
        addresses = list(map(Tensor.data_ptr, known))
        return lambda others: (
            len(others) == len(known)
            and all(map(is_, others, known))
            and list(map(Tensor.data_ptr, others)) == addresses
        )
    same, data_ptr = _loaded.same, data_ptr_function()
    memory = array("q", map(Tensor.data_ptr, known))
    address, _ = memory.buffer_info()

    def check(others: list[Tensor], memory: object = memory) -> bool:  # which keeps the addresses alive
        return bool(same(others, known, address, data_ptr))

    return check
