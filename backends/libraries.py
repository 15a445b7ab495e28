"""Build C++ libraries with Inductor's builder, and load them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from array import array
from collections.abc import Callable, Sequence
from operator import is_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_optim.backends import disk_cache
from compiled_optim.torch_private import data_ptr_function

MODULE = "table_unit"
"""The name under which a library initialises itself as an extension module (``PyInit_table_unit``)."""


_loaded: Any = None
"""The library that was loaded last. All have the same functions that check lists of tensors."""


def build(source: str) -> Path:
    """Return the library of a C++ source; build it unless it exists."""
    from compiled_optim.torch_private import CppBuilder, CppTorchDeviceOptions, pick_vec_isa

    # as Inductor builds its kernels, except that no header is precompiled: that takes longer than a unit
    options = CppTorchDeviceOptions(vec_isa=pick_vec_isa(), include_pytorch=False, shared=True, device_type="cpu")
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
        builder = CppBuilder(name=name, sources=[str(file)], BuildOption=options, output_dir=place)
        builder.build()
        os.replace(builder.get_target_file_path(), library)  # no other process sees a part of it
    disk_cache.write(digest, disk_cache.digest_of(library))
    return library


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
