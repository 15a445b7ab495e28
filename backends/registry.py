"""The registry: backends by name, and the default backend of each device type.

A third-party backend that serves a device type is preferred over the built-in one.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from importlib.metadata import entry_points

import torch

from compiled_optim.backends.base import Backend
from compiled_optim.backends.cpu import CpuBackend
from compiled_optim.backends.cuda import CudaBackend
from compiled_optim.backends.eager import EagerBackend
from compiled_optim.backends.npu import NpuBackend, NpuInductorBackend
from compiled_optim.errors import BackendUnavailableError

ENTRY_POINT_GROUP = "compiled_optim.backends"

_backends: dict[str, Backend] = {}
_entry_points_loaded = False


def register(backend: Backend) -> Backend:
    """Register a backend under its name; it replaces an earlier one of that name."""
    _backends[backend.name] = backend
    copyreg.pickle(type(backend), _by_name)  # pickles of an optimizer contain the name only
    return backend


def names() -> list[str]:
    """Return the names of all registered backends."""
    _load_entry_points()
    return sorted(_backends)


def get(name: str) -> Backend:
    """Return the backend of this name."""
    _load_entry_points()
    try:
        return _backends[name]
    except KeyError:
        raise ValueError(f"Unknown backend: {name!r}; registered are {', '.join(names())}") from None


def for_device(device_type: str) -> Backend:
    """Return the backend that compiles for a device type; the most recently registered one wins."""
    _load_entry_points()
    for backend in reversed(_backends.values()):
        if device_type in backend.devices:
            return backend
    raise BackendUnavailableError(
        f"no backend compiles for device type {device_type!r}; "
        f"pass compile=False to run the same step eagerly, or register a backend that serves it"
    )


def select(optimizer: str, device: torch.device, preferred: Backend | None) -> Backend:
    """Return the preferred backend, or the default one for the device; raise if it cannot be used here."""
    backend = preferred or for_device(device.type)
    if backend.devices and device.type not in backend.devices:
        raise BackendUnavailableError(
            f"backend {backend.name!r} serves {', '.join(backend.devices)}, but a parameter is on {device.type!r}; "
            "use backend=None to choose the backend by device"
        )
    available = backend.available()
    if not available:
        raise BackendUnavailableError(f"{optimizer} cannot be compiled by backend {backend.name!r}: {available.reason}")
    return backend


def _by_name(backend: Backend) -> tuple[Callable[[str], Backend], tuple[str]]:
    return get, (backend.name,)


def _load_entry_points() -> None:
    global _entry_points_loaded
    if not _entry_points_loaded:
        for entry_point in entry_points(group=ENTRY_POINT_GROUP):
            register(entry_point.load()())
        _entry_points_loaded = True


# the last one for a device type is its default
for _backend in (CpuBackend, CudaBackend, NpuInductorBackend, NpuBackend, EagerBackend):
    register(_backend())
