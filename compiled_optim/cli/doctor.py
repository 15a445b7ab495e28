"""``python -m compiled_optim doctor``: compile and run a step with each backend, and print which of them work."""

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
    """Print the tables; return 0 if at least one backend compiles, else 1."""
    kept = disk_cache.count_records()  # before this command adds records
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
    """Compile and run a step; return True if the result is right, and a sentence for the table."""
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
        optimizer.compile = True  # even if COMPILED_OPTIM_EAGER is set
        optimizer.step()
        values = param.tolist()
    except Exception as error:  # a compiler may raise anything; it is reported
        return False, f"does not compile: {str(error).strip() or type(error).__name__}"
    if values != [0.5] * 3:
        return False, f"compiles, but a step from 1 by 0.5 leads to {values}"
    return True, f"compiles; the first step took {time.perf_counter() - start:.1f} s"


def compiler_found() -> str:
    """Return the path of the C++ compiler that Inductor will call, and its version."""
    path = shutil.which(compiler())
    if path is None:
        return f"none (looked for {compiler()!r})"
    try:
        version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{path}, which fails: {error}"
    return f"{path}: {(version.splitlines() or ['unknown version'])[0]}"


def vector_isa() -> str:
    """Return the vector instruction set that Inductor selects; Inductor tests it by compiling with it."""
    try:
        from compiled_optim.torch_private import pick_vec_isa

        isa = pick_vec_isa()
    except Exception as error:  # no compiler, or another version of torch
        return f"unknown: {error}"
    return str(isa) if isa else "none"


def matters(variable: str) -> bool:
    """Return True if an environment variable affects compilation or the choice of devices."""
    return variable in VARIABLES or variable.startswith(PREFIXES)
