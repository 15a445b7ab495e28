"""Asynchronous copies between host and device, by way of pinned memory.

What changes in every step is sent to the device in one copy.

The host does not wait for the device, so several steps may be under way. A copy reads the pinned memory when the device
gets to it. Therefore each copy has a buffer of its own, which is used again only when the event behind its copy has
been reached. If all buffers are in use, there is a new one.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

INITIAL_BUFFERS = 2


class Buffer(NamedTuple):
    """Host memory, as bytes and as a tensor, and the event behind the last copy from it."""

    memory: memoryview
    tensor: Tensor
    event: Any


class Staging:
    """Host buffers that are used in turn, and the memory on the device that they are copied to."""

    def __init__(self, size: int, device: torch.device, make_event: Callable[[], Any] | None = None) -> None:
        """``size`` is the number of bytes. ``make_event`` makes events with the methods ``record`` and ``query``."""
        self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self._on_host = device.type == "cpu"
        self._make_event = make_event or (_Reached if self._on_host else torch.cuda.Event)
        self._buffers = deque(self._new() for _ in range(INITIAL_BUFFERS))

    def __len__(self) -> int:
        return len(self._buffers)

    def take(self) -> Buffer:
        """Return a buffer that no copy reads. It belongs to the caller until it is passed to :meth:`send`."""
        return self._buffers.popleft() if self._buffers and self._buffers[0].event.query() else self._new()

    def send(self, buffer: Buffer, size: int) -> None:
        """Copy the first ``size`` bytes of a buffer to the device, in the order of the current stream."""
        self.memory[:size].copy_(buffer.tensor[:size], non_blocking=True)
        buffer.event.record()
        self._buffers.append(buffer)

    def _new(self) -> Buffer:
        tensor = torch.zeros(len(self.memory), dtype=torch.uint8, device="cpu", pin_memory=not self._on_host)
        return Buffer(bytes_of(tensor), tensor, self._make_event())


def fetch(value: Tensor) -> Callable[[], float]:
    """Copy a 0-dim tensor to the host without waiting; return a function that waits for the copy and reads it."""
    if value.device.type == "cpu":
        return value.clone().item
    device_module: Any = torch.get_device_module(value.device)
    host = torch.empty((), dtype=value.dtype, device="cpu", pin_memory=True)
    host.copy_(value, non_blocking=True)
    event = device_module.Event()
    event.record(device_module.current_stream(value.device))

    def read() -> float:
        event.synchronize()
        return host.item()

    return read


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class _Reached:
    """The event behind a copy on the host, which is done when the call returns."""

    def record(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return True: the copy is done."""
        return True
