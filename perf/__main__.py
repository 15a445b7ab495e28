"""Command line of the benchmark report: ``python -m perf --help``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from perf.report import BadInput, Report


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> Parser:
    """Return the parser of the command line."""
    from perf.cases import DTYPES
    from perf.contenders import CONTENDERS
    from perf.optimizers import RULES
    from perf.workloads import WORKLOADS

    made = Parser(
        prog="python -m perf",
        description="Measure the step time of the optimizers on this machine. Compare it with torch.optim, with other "
        "packages and with the limit set by memory bandwidth. Measure how the step time changes with the number of "
        "threads, the memory of each storage, and the cost of construction, compilation and the first step. Without "
        "--workload, --optimizer and --dtype, run a default list, which takes a few minutes. With any of these "
        "options, run every combination of the given values.",
    )

    def several(flag: str, table: Sequence[str], about: str) -> None:
        made.add_argument(
            flag,
            action="append",
            default=[],
            metavar="NAME",
            help=f"{about}; may be repeated: {', '.join(table)}; or all",
        )

    several("--workload", list(WORKLOADS), "the model whose parameter shapes are used")
    several("--optimizer", list(RULES), "the optimizer to measure")
    several("--dtype", list(DTYPES), "the dtype of parameters and gradients")
    several("--contender", list(CONTENDERS), "the implementation to measure")
    made.add_argument(
        "--storages",
        action="store_true",
        help="race only torch fused, ours, and ours with each storage of states and bfloat16 parameters, for AdamW; "
        "default workloads: resnet50, gpt2_small",
    )
    made.add_argument(
        "--device",
        default="cpu",
        help="cpu (default), cuda, cuda:1, npu, ...; devices other than cpu are timed with events",
    )
    made.add_argument("--rounds", type=int, metavar="N", help="rounds of each race; default: about 4 seconds")
    scaling = made.add_mutually_exclusive_group()
    scaling.add_argument(
        "--thread-scaling",
        action="append",
        metavar="NAME",
        help="the workload to measure with 1, 2, 4, ... threads; may be repeated; default: resnet50",
    )
    scaling.add_argument("--no-thread-scaling", action="store_true", help="do not measure with 1, 2, 4, ... threads")
    memory = made.add_mutually_exclusive_group()
    memory.add_argument(
        "--memory",
        action="append",
        metavar="NAME",
        help="the workload whose memory is measured with each storage of AdamW; may be repeated; default: resnet50",
    )
    memory.add_argument("--no-memory", action="store_true", help="do not measure memory")
    made.add_argument("--no-races", action="store_true", help="measure everything but step times")
    made.add_argument("--no-compile-cost", action="store_true", help="do not measure construction and the first step")
    made.add_argument("--load", type=Path, metavar="FILE", help="print a report saved by --json; measure nothing")
    made.add_argument("--compare", type=Path, metavar="FILE", help="print the changes since a report saved by --json")
    made.add_argument("--json", type=Path, metavar="FILE", help="save the report as JSON")
    made.add_argument("--markdown", type=Path, metavar="FILE", help="save the report as Markdown")
    made.add_argument(
        "--html", type=Path, metavar="FILE", help="save the report as one HTML page with tables and plots"
    )
    made.add_argument("--plot", type=Path, metavar="FILE", help="plot the step times; FILE ends in .png, .svg or .pdf")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or load a report, write it, and return the exit code."""
    try:
        from perf.run import Request, run
    except ModuleNotFoundError as error:
        print(f"python -m perf: {error.name} is not installed: pip install .[perf]", file=sys.stderr)
        return 2
    from perf.outputs import check_writable, write

    made = parser()
    given = made.parse_args(arguments)
    try:
        old = Report.load(given.compare) if given.compare else None
        check_writable(given.json, given.markdown, given.html, given.plot)
        if given.load:
            report = Report.load(given.load)
        else:
            request = Request.of(
                given.workload, given.optimizer, given.dtype, given.contender, given.device, given.rounds,
                scaling=[] if given.no_thread_scaling else given.thread_scaling,
                races=not given.no_races,
                storages=given.storages,
                compile_cost=not given.no_compile_cost,
                memory=[] if given.no_memory else given.memory,
            )  # fmt: skip
            words = sys.argv[1:] if arguments is None else arguments
            report = run(request, command=shlex.join(["python", "-m", "perf", *words]))
        write(report, old, given.json, given.markdown, given.html, given.plot)
    except BadInput as error:
        made.error(str(error))
    return 130 if report.interrupted and not given.load else 0


if __name__ == "__main__":
    sys.exit(main())
