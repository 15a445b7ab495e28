"""``python -m compiled_optim warmup``: compile an optimizer's units into the cache directory, for example of an image.

Limit: this works only for backends whose units serve every model, such as the CPU. A backend that compiles shapes in
needs the model; call ``optimizer.warmup()`` there.
"""

from __future__ import annotations

import argparse
import ast
from typing import Any

import torch
from tabulate import tabulate

import compiled_optim
from compiled_optim import backends
from compiled_optim.backends import WholeListBackend
from compiled_optim.diagnostics.units import FROM_PROCESS
from compiled_optim.errors import BackendUnavailableError

SHAPES = [(2,), (2, 2)]
"""Tensors of one dimension and, for rowwise rules, of two. A unit takes tensors of all sizes."""

OPTIMIZERS = {
    name.lower(): rule
    for name in compiled_optim.__all__
    if isinstance(rule := getattr(compiled_optim, name), type)
    and issubclass(rule, compiled_optim.Optimizer)
    and rule is not compiled_optim.Optimizer
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    names = ", ".join(OPTIMIZERS)
    parser.add_argument(
        "--optimizer", required=True, type=_optimizers, help=f"one or more of {names}, separated by commas"
    )
    parser.add_argument(
        "--dtype", default="float32", type=_dtypes, help="dtypes of the parameters, separated by commas (float32)"
    )
    parser.add_argument("--device", default="cpu", help="a device type (cpu)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=_setting,
        metavar="NAME=VALUE",
        dest="settings",
        help="an argument that the training script passes to the optimizer, such as momentum=0.9",
    )


def run(arguments: argparse.Namespace) -> int:
    """Compile the units with and without gradient clipping and print them; return 0 on success, else 1."""
    try:
        backend = backends.for_device(arguments.device)
    except BackendUnavailableError as error:
        print(error)
        return 1
    if isinstance(backend, WholeListBackend):
        print(
            f"backend {backend.name!r} compiles for the shapes of a model: construct the optimizer on the model and "
            "call its warmup() instead"
        )
        return 1
    available = backend.available()
    if not available:
        print(available.reason)
        return 1
    rows = []
    for rule in arguments.optimizer:
        for settings in ({}, {"max_grad_norm": 1.0}):
            params = [
                torch.nn.Parameter(torch.ones(shape, dtype=dtype, device=arguments.device))
                for dtype in arguments.dtype
                for shape in SHAPES
            ]
            try:
                optimizer = rule(params, **{**settings, **dict(arguments.settings)})
            except (TypeError, ValueError) as error:
                print(f"{rule.__name__} does not accept the arguments of --set: {error}")
                return 1
            try:
                optimizer.warmup()
            except BackendUnavailableError as error:
                print(error)
                return 1
            made = [unit for unit in optimizer.explain().units if unit.source != FROM_PROCESS]
            rows += [(unit.name, f"{unit.seconds:.2f}", unit.source) for unit in made]
    if not rows:
        print("nothing was compiled: unset COMPILED_OPTIM_EAGER, and remove --set compile=False")
        return 1
    print(tabulate(rows, headers=("unit", "seconds", "from"), disable_numparse=True))
    print(f"kept in {backend.cache_directory()}")
    return 0


def _optimizers(text: str) -> list[type[Any]]:
    unknown = [name for name in text.split(",") if name.lower() not in OPTIMIZERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown optimizer {unknown[0]!r}; there are {', '.join(OPTIMIZERS)}")
    return [OPTIMIZERS[name.lower()] for name in text.split(",")]


def _dtypes(text: str) -> list[torch.dtype]:
    found = [getattr(torch, name, None) for name in text.split(",")]
    for name, dtype in zip(text.split(","), found, strict=True):
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise argparse.ArgumentTypeError(f"{name!r} is not a floating-point dtype of torch")
    return [dtype for dtype in found if isinstance(dtype, torch.dtype)]


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value
