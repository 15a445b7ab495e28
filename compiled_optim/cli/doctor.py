"""``python -m compiled_optim doctor``: what this machine can do, proved by compiling a step with each backend."""

from __future__ import annotations

import os
import shutil
import subprocess
import time

import torch
from tabulate import tabulate

import compiled_optim
from compiled_optim import backends
from compiled_optim.backends import Backend, disk_cache
from compiled_optim.backends.cpu import compiler

VARIABLES = (
    *("ASCEND_RT_VISIBLE_DEVICES", "CC", "CUDA_VISIBLE_DEVICES", "CXX", "OMP_NUM_THREADS"),
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
)
PREFIXES = ("COMPILED_OPTIM_", "TORCHINDUCTOR_", "TRITON_")


def run() -> int:
    """Print the tables; 0 if at least one backend compiles, else 1."""
    kept = disk_cache.count_records()  # before this command adds one
    answers = {name: examine(backends.get(name)) for name in backends.names()}
    facts = [
        ("torch", torch.__version__),
        ("C++ compiler", compiler_found()),
        ("vector ISA", vector_isa()),
        ("threads", torch.get_num_threads()),
        ("cache directory", disk_cache.directory()),
        ("units kept there", f"{kept} of this version, to be loaded without compiling"),
    ]
    rows = [(name, ", ".join(backends.get(name).devices) or "any", answer) for name, (_, answer) in answers.items()]
    in_force = [(name, value) for name, value in sorted(os.environ.items()) if matters(name)]
    print(tabulate(facts, tablefmt="plain"))
    print()
    print(tabulate(rows, headers=("backend", "devices", "here"), maxcolwidths=(None, None, 90)))
    print()
    print(
        tabulate(in_force, headers=("variable", "value")) if in_force else "no environment variable that matters is set"
    )
    return 0 if any(compiled for compiled, _ in answers.values()) else 1


def examine(backend: Backend) -> tuple[bool, str]:
    """Whether a backend compiles a step here that computes what it should, and what there is to say."""
    available = backend.available()
    if not available:
        return False, f"not available: {available.reason}"
    if not backend.compiles:
        return False, "available; compiles nothing"
    device = torch.device(backend.devices[0] if backend.devices else "cpu")
    start = time.perf_counter()
    try:
        param = torch.nn.Parameter(torch.ones(3, device=device))
        param.grad = torch.ones_like(param)
        optimizer = compiled_optim.SGD([param], lr=0.5, backend=backend)
        optimizer.compile = True  # COMPILED_OPTIM_EAGER says nothing about what can be compiled
        optimizer.step()
        values = param.tolist()
    except Exception as error:  # whatever a compiler raises is the answer
        return False, f"does not compile: {str(error).strip() or type(error).__name__}"
    if values != [0.5] * 3:
        return False, f"compiles, but a step from 1 by 0.5 leads to {values}"
    return True, f"compiles; the first step took {time.perf_counter() - start:.1f} s"


def compiler_found() -> str:
    """The C++ compiler Inductor will use, and its version."""
    path = shutil.which(compiler())
    if path is None:
        return f"none (looked for {compiler()!r})"
    try:
        version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{path}, which fails: {error}"
    return f"{path}: {(version.splitlines() or ['it does not say its version'])[0]}"


def vector_isa() -> str:
    """The vector instructions Inductor found that it can use, by compiling with them."""
    try:
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        isa = pick_vec_isa()
    except Exception as error:  # no compiler, or a torch where this is elsewhere
        return f"unknown: {error}"
    return str(isa) if isa else "none"


def matters(variable: str) -> bool:
    """Whether an environment variable changes what is compiled or where it is looked for."""
    return variable in VARIABLES or variable.startswith(PREFIXES)
