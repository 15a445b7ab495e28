"""The CUDA backend with its tensors in host memory: whole optimizers run on kernels that Triton interprets."""

from __future__ import annotations

from dataclasses import replace

from compiled_optim.backends import Availability, Signature, Unit
from compiled_optim.backends.cuda import CudaBackend
from compiled_optim.backends.triton_compiler import compile_triton_table, load_triton_table


class HostCuda(CudaBackend):
    """Compiles for ``cuda:0``; parameters, states and the table are on the CPU."""

    name = "host-cuda"
    devices = ("cpu",)

    def available(self) -> Availability:
        return Availability(True)

    def load_table(self, signature: Signature) -> Unit | None:
        return load_triton_table(replace(signature, device="cuda:0"), memory="cpu")

    def compile_table(self, signature: Signature) -> Unit:
        return compile_triton_table(replace(signature, device="cuda:0"), memory="cpu")

    def check_step(self) -> None:
        pass  # a CPU build of torch cannot ask whether a stream is capturing
