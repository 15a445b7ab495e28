"""The memory: how fast it can be read, changed and written here, and how much of it a step takes for itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from perf.clock import Clock


def cache_bytes(device: torch.device) -> int:
    """The size of the last-level cache; a generous guess where the system does not tell."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or 1 << 26
    if device.type != "cpu":
        return 1 << 28
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size.removesuffix("K")) * 1024 for size in sizes if size.endswith("K")), default=1 << 26)


class Memory:
    """Measures the bandwidth of read-modify-write passes over arrays that do not fit in the cache, with all threads.

    The best pass is the limit: no step over as many bytes can be faster. Passes are made in every
    round, because what the memory can do depends on who else uses it.
    """

    def __init__(self, device: torch.device) -> None:
        self.cache = cache_bytes(device)
        self.clock = Clock(device)
        self.passes = 0
        self.bytes_per_second = 0.0
        elements = max(self.cache, 1 << 25)  # of 4 bytes each: an array has four times the size of the cache
        self.a, self.b, self.c = (torch.full((elements,), 0.5, device=device) for _ in range(3))

    def fits(self, footprint: int) -> bool:
        """Whether a good part of so many bytes may stay in the cache, so that the limit does not hold for them."""
        return footprint < 4 * self.cache

    def sweep(self) -> None:
        """Push everything else out of the cache."""
        self.a[: self.cache // 2].mul_(1.0)

    def measure(self) -> None:
        """Make a pass of each kind: one, two or three arrays read, one of them written."""
        for arrays, run in (
            (2, lambda: self.a.mul_(0.999)),
            (3, lambda: self.a.add_(self.b, alpha=1e-9)),
            (4, lambda: self.a.addcmul_(self.b, self.c, value=1e-9)),
        ):
            rate = arrays * 4 * self.a.numel() / self.clock.time(run)
            self.bytes_per_second = max(self.bytes_per_second, rate)
            self.passes += 1


def extra_bytes(step: Callable[[], object], device: torch.device) -> int:
    """The most memory that a step holds beyond what it began with.

    On the CPU the allocations that torch's profiler sees are summed up; elsewhere the device's allocator is asked.
    """
    if device.type != "cpu":
        module = torch.get_device_module(device)
        before = module.memory_allocated(device)
        module.reset_peak_memory_stats(device)
        step()
        module.synchronize(device)
        return int(module.max_memory_allocated(device) - before)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would write to stderr
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
