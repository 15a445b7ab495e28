"""The perf report: ``python -m perf --help``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from perf.report import BadInput, Report


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Leave with exit code 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> Parser:
    """The command line."""
    from perf.cases import DTYPES
    from perf.contenders import CONTENDERS
    from perf.optimizers import RULES
    from perf.workloads import WORKLOADS

    made = Parser(
        prog="python -m perf",
        description="How fast the optimizers step on this machine, against torch.optim and other packages, against "
        "what the memory can do, and what compiling costs. Without --workload, --optimizer and --dtype a default list "
        "is run, in a few minutes; with any of them every combination of what is named.",
    )

    def several(flag: str, table: Sequence[str], about: str) -> None:
        made.add_argument(
            flag,
            action="append",
            default=[],
            metavar="NAME",
            help=f"{about}, may be repeated: {', '.join(table)}; or all",
        )

    several("--workload", list(WORKLOADS), "which shapes")
    several("--optimizer", list(RULES), "which optimizer")
    several("--dtype", list(DTYPES), "which dtype")
    several("--contender", list(CONTENDERS), "who takes part")
    made.add_argument(
        "--device", default="cpu", help="cpu (default), cuda, cuda:1, npu, ...; devices are timed by events"
    )
    made.add_argument("--rounds", type=int, metavar="N", help="rounds in each race; default: about 4 seconds' worth")
    made.add_argument(
        "--no-compile-cost", action="store_true", help="leave out the first steps in processes of their own"
    )
    made.add_argument("--load", type=Path, metavar="FILE", help="show a report saved by --json instead of measuring")
    made.add_argument("--compare", type=Path, metavar="FILE", help="say what changed since a report saved by --json")
    made.add_argument("--json", type=Path, metavar="FILE", help="save the report as JSON")
    made.add_argument("--markdown", type=Path, metavar="FILE", help="save the report as Markdown")
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw the step times: .png, .svg or .pdf")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the report; returns the exit code."""
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
        check_writable(given.json, given.markdown, given.plot)
        if given.load:
            report = Report.load(given.load)
        else:
            request = Request.of(
                given.workload, given.optimizer, given.dtype, given.contender, given.device, given.rounds,
                compile_cost=not given.no_compile_cost,
            )  # fmt: skip
            words = sys.argv[1:] if arguments is None else arguments
            report = run(request, command=shlex.join(["python", "-m", "perf", *words]))
        write(report, old, given.json, given.markdown, given.plot)
    except BadInput as error:
        made.error(str(error))
    return 130 if report.interrupted and not given.load else 0


if __name__ == "__main__":
    sys.exit(main())
