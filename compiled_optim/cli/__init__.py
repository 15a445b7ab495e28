"""The commands of ``python -m compiled_optim``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from compiled_optim.cli import doctor, warmup


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m compiled_optim", description="Compiled PyTorch optimizers.")
    commands = parser.add_subparsers(required=True, dest="command")
    command = commands.add_parser("doctor", help="show which backends work on this machine, and what the others need")
    command.set_defaults(run=lambda _: doctor.run())
    command = commands.add_parser("warmup", help="compile an optimizer's units into the cache directory")
    warmup.add_arguments(command)
    command.set_defaults(run=warmup.run)
    parsed = parser.parse_args(arguments)
    return int(parsed.run(parsed))
