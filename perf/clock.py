"""Time one call: with the wall clock on the CPU, with device events on other devices."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class Clock:
    """Time calls on one device. CUDA and NPU events measure the work of the device, not the time of the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = None if device.type == "cpu" else torch.get_device_module(device)

    def time(self, call: Callable[[], object]) -> float:
        """Return the seconds that a call takes."""
        if self.module is None:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = (self.module.Event(enable_timing=True) for _ in range(2))
        self.module.synchronize(self.device)
        begin.record()
        call()
        end.record()
        self.module.synchronize(self.device)
        return float(begin.elapsed_time(end)) / 1e3
