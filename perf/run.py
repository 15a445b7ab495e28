"""Run the benchmark: races, thread scaling and the cost of compilation, with a progress bar on stderr."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from perf import compile_cost, host_costs, storage_memory
from perf.busy import Others
from perf.cases import DTYPES, SCALED, STORED, Case, choose
from perf.children import ChildError
from perf.contenders import BASELINES, CONTENDERS, OURS
from perf.memory import Memory
from perf.optimizers import RULES
from perf.race import Length, Progress, Race
from perf.report import BadInput, Report
from perf.scaling import Scaling
from perf.storages import OPTIMIZER, OWN
from perf.workloads import WORKLOADS


def known(kind: str, names: Sequence[str], table: Sequence[str]) -> list[str]:
    """Return the names, with "all" replaced by the whole table. Raise BadInput for an unknown name."""
    for name in names:
        if name not in (*table, "all"):
            raise BadInput(f"unknown {kind} {name!r}: choose from {', '.join(table)}, all")
    return list(table) if "all" in names else list(names)


def usable(name: str) -> torch.device:
    """Return the device of this name. Raise BadInput if it is not available."""
    try:
        if name.startswith("npu"):
            import torch_npu  # type: ignore[import-not-found]  # noqa: F401
        device = torch.device(name)
        module = torch.get_device_module(device)
        there = device.type == "cpu" or (module.is_available() and (device.index or 0) < module.device_count())
    except (ImportError, RuntimeError, AttributeError):
        there = False
    if not there:
        raise BadInput(f"no device {name!r} here")
    return device


@dataclass(frozen=True)
class Request:
    """The races to run, the workloads of the thread scaling, and the options of the run."""

    cases: list[Case]
    contenders: list[str]
    device: torch.device
    rounds: int | None
    scaling: list[str]
    compile_cost: bool
    memory: list[str]

    @classmethod
    def of(
        cls,
        workloads: Sequence[str],
        optimizers: Sequence[str],
        dtypes: Sequence[str],
        contenders: Sequence[str],
        device: str,
        rounds: int | None,
        scaling: Sequence[str] | None,
        races: bool,
        storages: bool,
        compile_cost: bool,
        memory: Sequence[str] | None,
    ) -> Request:
        """Return a request for command-line arguments. Raise BadInput if one is invalid.

        ``scaling`` and ``memory`` are None for the default, which is no scaling if the device is not the CPU.
        """
        workloads = known("workload", workloads, list(WORKLOADS))
        optimizers = known("optimizer", optimizers, list(RULES))
        dtypes = known("dtype", dtypes, list(DTYPES))
        if storages:
            if {*optimizers} - {OPTIMIZER}:
                raise BadInput(f"--storages compares {OPTIMIZER} only")
            workloads, dtypes = workloads or STORED, dtypes or list(DTYPES)
            contenders = contenders or [BASELINES[0], OURS, *OWN]
        everybody = "all" in contenders
        contenders = known("contender", contenders, list(CONTENDERS))
        for name in contenders:
            if not everybody and (reason := CONTENDERS[name].absent()) is not None:
                raise BadInput(f"contender {name!r} is {reason}")
        if rounds is not None and rounds < 1:
            raise BadInput(f"--rounds {rounds}: at least 1")
        cases = choose(workloads, optimizers, dtypes) if races else []
        found = usable(device)
        if scaling and found.type != "cpu":
            raise BadInput(f"--thread-scaling measures the CPU, not {device!r}")
        if scaling is None:
            scaling = SCALED if found.type == "cpu" else ()
        if memory is None:
            memory = [storage_memory.DEFAULT]
        table = list(WORKLOADS)
        scaled, stored = known("workload", scaling, table), known("workload", memory, table)
        return cls(cases, contenders, found, rounds, scaled, compile_cost, stored)


def run(request: Request, command: str) -> Report:
    """Run the measurements and return the report. Ctrl-C ends the run early; the results so far are kept."""
    start, others = time.perf_counter(), Others()
    now = datetime.datetime.now().astimezone()
    report = Report(machine(request.device), command, now.strftime("%Y-%m-%d %H:%M"))
    jobs = _jobs(request, report)
    started = 0
    shown = [0.0]
    with tqdm(total=len(jobs), bar_format="{percentage:3.0f}%|{bar:30}| {elapsed} {desc}", file=sys.stderr) as bar:

        def show(what: str, fraction: float) -> None:
            bar.n = max(started - 1, 0) + fraction
            bar.set_description_str(what, refresh=False)
            if time.perf_counter() - shown[0] > (0.2 if sys.stderr.isatty() else 10.0):
                bar.refresh()
                shown[0] = time.perf_counter()

        memory: Memory | None = None
        try:
            show("measuring the memory", 0.0)
            memory = Memory(request.device)
            for _ in range(5):
                memory.measure()
            for name, job in jobs:
                started += 1
                job(memory, partial(_named, show, name))
            show("done", 1.0)
        except KeyboardInterrupt:
            report.interrupted = True
            left = [name for name, _ in jobs[started:]]
            report.notes += [f"not started: {', '.join(left)}"] if left else []
        if memory is not None:
            report.bytes_per_second, report.passes = memory.bytes_per_second, memory.passes
            report.machine["cache"] = f"{memory.cache / 2**20:.0f} MiB last level"
    report.seconds = time.perf_counter() - start
    report.notes += others.note()
    return report


def _named(show: Progress, name: str, what: str, fraction: float) -> None:
    show(f"{name}: {what}", fraction)


Job = Callable[[Memory, Progress], None]


def _jobs(request: Request, report: Report) -> list[tuple[str, Job]]:
    """Return the names of the measurements, and functions that run them and add the results to the report."""
    length = Length(request.rounds)

    def race(case: Case, memory: Memory, progress: Progress) -> None:
        run = Race(case, request.device, memory, length, request.contenders)
        try:
            run.run(progress)
        finally:
            report.rows += run.rows()

    def scale(workload: str, memory: Memory, progress: Progress) -> None:
        scaling = Scaling(workload, memory, length)
        try:
            scaling.run(progress)
        finally:
            report.scaling += scaling.rows()
            report.notes += scaling.errors()

    def first_steps(memory: Memory, progress: Progress) -> None:
        device = request.device.type
        with tempfile.TemporaryDirectory() as root:
            try:
                for first in compile_cost.first_steps(
                    device, Path(root), lambda what, part: progress(what, 0.7 * part)
                ):
                    report.first_steps.append(first)
                for new in compile_cost.new_processes(
                    device, Path(root), lambda what, part: progress(what, 0.7 + 0.2 * part)
                ):
                    report.new_processes.append(new)
            except ChildError as error:
                report.notes.append(str(error))
        progress("further optimizers", 0.9)
        for cost in host_costs.measure(device):
            report.host_costs.append(cost)

    def memory(workload: str, bandwidth: Memory, progress: Progress) -> None:
        for row in storage_memory.memory_rows(request.device.type, workload, progress):
            report.memory.append(row)

    jobs: list[tuple[str, Job]] = [(str(case), partial(race, case)) for case in request.cases]
    jobs += [(f"thread scaling of {workload}", partial(scale, workload)) for workload in request.scaling]
    jobs += [(f"memory of {workload}", partial(memory, workload)) for workload in request.memory]
    return [*jobs, *([("first steps", first_steps)] if request.compile_cost else [])]


def machine(device: torch.device) -> dict[str, str]:
    """Return a description of the machine, the device and the package versions."""
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    peers = [name for name, contender in CONTENDERS.items() if contender.package and contender.absent() is None]
    found = {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "device": str(device),
        "torch": torch.__version__,
        "compiled_optim": importlib.metadata.version("compiled_optim"),
        "peers": ", ".join(f"{name} {_version(CONTENDERS[name].distribution)}" for name in peers) or "none installed",
    }
    if device.type != "cpu":
        found["device"] += f" ({torch.get_device_module(device).get_device_name(device)})"
    return found


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
