"""Measure the memory bandwidth of the device, and the memory that a step allocates."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from perf.clock import Clock


def cache_bytes(device: torch.device) -> int:
    """Return the size of the last-level cache, or a large default if the system does not report it."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or 1 << 26
    if device.type != "cpu":
        return 1 << 28
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size.removesuffix("K")) * 1024 for size in sizes if size.endswith("K")), default=1 << 26)


class Memory:
    """Measure the bandwidth of read-modify-write passes over arrays that do not fit in the cache, with all threads.

    The fastest pass is the limit: no step that moves the same number of bytes can be faster. Passes run in every round,
    because the available bandwidth depends on the other processes.
    """

    def __init__(self, device: torch.device) -> None:
        self.cache = cache_bytes(device)
        self.clock = Clock(device)
        self.passes = 0
        self.bytes_per_second = 0.0
        elements = max(self.cache, 1 << 25)  # 4 bytes each: an array is four times as large as the cache
        self.a, self.b, self.c = (torch.full((elements,), 0.5, device=device) for _ in range(3))

    def fits(self, footprint: int) -> bool:
        """Return whether much of ``footprint`` bytes may stay in the cache. The limit does not apply there."""
        return footprint < 4 * self.cache

    def sweep(self) -> None:
        """Evict all other data from the cache."""
        self.a[: self.cache // 2].mul_(1.0)

    def measure(self) -> None:
        """Run one pass of each kind: read one, two or three arrays and write one of them."""
        for arrays, run in (
            (2, lambda: self.a.mul_(0.999)),
            (3, lambda: self.a.add_(self.b, alpha=1e-9)),
            (4, lambda: self.a.addcmul_(self.b, self.c, value=1e-9)),
        ):
            rate = arrays * 4 * self.a.numel() / self.clock.time(run)
            self.bytes_per_second = max(self.bytes_per_second, rate)
            self.passes += 1


def extra_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Return the peak memory of a step, minus the memory allocated before it.

    On the CPU it is the running sum of the allocations in torch's profiler. On other devices it comes from the
    statistics of the device's allocator.
    """
    if device.type != "cpu":
        module = torch.get_device_module(device)
        before = module.memory_allocated(device)
        module.reset_peak_memory_stats(device)
        step()
        module.synchronize(device)
        return int(module.max_memory_allocated(device) - before)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keeps the profiler from writing to stderr
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
