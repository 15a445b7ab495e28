"""Inductor's CUDA path on a machine without a GPU and with a CPU build of torch.

By default, the ptxas that comes with Triton compiles the kernels to machine code (sm_80), and launches are recorded but
not run. With ``TRITON_INTERPRET=1``, Triton's interpreter runs the launches on CPU memory.

This module replaces private functions of torch 2.13.0 and triton 3.7.1 for the whole process. Use it only in a separate
process, with ``TORCHINDUCTOR_COMPILE_THREADS=1``: compile workers would not see the replacements.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._dynamo import device_interface
from torch.utils._python_dispatch import TorchDispatchMode

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CAPABILITY = (8, 0)
PROPERTIES = SimpleNamespace(
    name="none",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    total_memory=80 << 30,
    multi_processor_count=108,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=166912,
    L2_cache_size=40 << 20,
    gcnArchName="",
    is_integrated=0,
)


@dataclass
class Recording:
    """The compiled kernels by name, and the names of the launched kernels in order."""

    kernels: dict[str, Any] = field(default_factory=dict)
    launches: list[str] = field(default_factory=list)

    def machine_code(self) -> dict[str, list[bytes]]:
        """Return, for each kernel, the output of ptxas for each of its configurations."""
        return {
            name: [result.kernel.asm["cubin"] for result in kernel.compile_results]
            for name, kernel in self.kernels.items()
        }

    def targets(self) -> list[str]:
        """Return the architectures that the kernels were compiled for."""
        texts = [result.kernel.asm["ptx"] for kernel in self.kernels.values() for result in kernel.compile_results]
        return sorted({line.split()[1] for text in texts for line in text.splitlines() if line.startswith(".target")})


class _Interface(device_interface.CudaInterface):
    """Device interface that reports one CUDA device, device 0, although there is none."""

    class Worker(device_interface.CudaInterface.Worker):
        current_device = staticmethod(lambda: 0)
        set_device = staticmethod(lambda device: None)
        get_device_properties = staticmethod(lambda device=None: PROPERTIES)

    current_device = staticmethod(lambda: 0)
    set_device = staticmethod(lambda device: None)
    device_count = staticmethod(lambda: 1)
    get_device_properties = staticmethod(lambda device=None: PROPERTIES)
    get_compute_capability = staticmethod(lambda device=None: CAPABILITY[0] * 10 + CAPABILITY[1])
    is_available = staticmethod(lambda: True)
    is_triton_capable = staticmethod(lambda device=None: True)
    raise_if_triton_unavailable = staticmethod(lambda device=None: None)
    get_raw_stream = staticmethod(lambda index=0: 0)
    is_bf16_supported = staticmethod(lambda including_emulation=False: True)
    exchange_device = staticmethod(lambda index: 0)
    maybe_exchange_device = staticmethod(lambda index: 0)
    synchronize = staticmethod(lambda device=None: None)


class _NoDeviceGuard(contextlib.nullcontext):
    def __init__(self, *_: object) -> None:
        super().__init__()


class _FoldOnCpu(TorchDispatchMode):
    """Create CUDA constants on the CPU: Inductor folds a constant by creating it on its device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = torch.device("cpu")
        return function(*args, **kwargs)


def _install_device_guard() -> None:
    """Register the meta device's guard for CUDA: a CPU build has no CUDA guard, and fake tensors need one."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 21).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # c10::DeviceType
    guards[cuda] = guards[cuda] or guards[meta]


@contextlib.contextmanager
def gpuless_cuda() -> Iterator[Recording]:
    """Make Inductor compile for device ``cuda:0`` within this context."""
    import triton
    from torch._C._dynamo import guards
    from torch._inductor import config
    from torch._inductor.constant_folding import ConstantFolder
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget

    _install_device_guard()
    recording = Recording()
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", CAPABILITY[0] * 10 + CAPABILITY[1], 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        is_active=lambda: True,
    )
    fold, run = ConstantFolder.run, CachingAutotuner.run

    def fold_on_cpu(folder, *args, **kwargs):
        with _FoldOnCpu():
            return fold(folder, *args, **kwargs)

    def record(kernel, *args, stream=0, **kwargs):
        recording.launches.append(kernel.inductor_meta["kernel_name"])
        return run(kernel, *args, stream=0, **kwargs) if INTERPRETED else None

    device_interface.get_interface_for_device("cuda")  # registers the real interfaces, which are replaced below
    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "get_device_properties", lambda device=None: PROPERTIES),
        (torch.cuda, "get_device_capability", lambda device=None: CAPABILITY),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "set_device", lambda device: None),
        (torch.cuda, "_DeviceGuard", _NoDeviceGuard),
        (torch.cuda, "synchronize", lambda device=None: None),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        (ConstantFolder, "run", fold_on_cpu),
        (CachingAutotuner, "run", record),
    ]
    if INTERPRETED:
        replaced.append((guards, "_empty_strided_cuda", guards._empty_strided_cpu))
    else:

        def keep(kernel):
            recording.kernels[kernel.fn.__name__] = kernel

        def empty(size, stride, dtype):
            return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

        replaced += [
            (guards, "_empty_strided_cuda", empty),
            (CachingAutotuner, "_make_launchers", keep),
            (CachingAutotuner, "_dynamic_scale_rblock", lambda kernel: None),
        ]
    with contextlib.ExitStack() as stack:
        interfaces = {"cuda": _Interface, "cuda:0": _Interface}
        stack.enter_context(mock.patch.dict(device_interface.device_interfaces, interfaces))
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=0, create=True))
        # the static launcher does not keep the machine code; a cached graph would not compile its kernels
        stack.enter_context(config.patch(use_static_triton_launcher=False, force_disable_caches=True))
        active = triton.runtime.driver._active
        triton.runtime.driver.set_active(driver)
        stack.callback(setattr, triton.runtime.driver, "_active", active)
        DeviceProperties.create.cache_clear()
        _triton.has_triton.cache_clear()
        yield recording
