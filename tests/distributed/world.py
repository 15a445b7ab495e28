"""Run functions on several ranks: local processes that communicate with gloo over the loopback interface."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.helpers import TIMEOUT

Case = Callable[[Path], Any]


def run(cases: Mapping[str, Case], ranks: int, folder: Path) -> dict[str, list[Any]]:
    """Return the result of each case on each rank.

    If a case raised, its result is an AssertionError with the traceback. All cases run one after the other in the same
    processes. They share files in ``folder``.
    """
    spawned = mp.start_processes(_rank, (ranks, dict(cases), folder), nprocs=ranks, join=False, start_method="spawn")
    try:
        while not spawned.join(timeout=TIMEOUT):
            if not any(process.is_alive() for process in spawned.processes):
                break
    finally:
        for process in spawned.processes:
            process.kill()
    found = [torch.load(folder / f"{ranks}.{rank}.pt", weights_only=False) for rank in range(ranks)]
    return {name: [answers[name] for answers in found] for name in cases}


def _rank(rank: int, ranks: int, cases: dict[str, Case], folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = f"file://{folder}/store.{ranks}"
    dist.init_process_group("gloo", store, timedelta(seconds=TIMEOUT), rank=rank, world_size=ranks)
    answers: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            answers[name] = case(folder)
        except Exception:
            answers[name] = AssertionError(traceback.format_exc())
        torch.save(answers, folder / f"{ranks}.{rank}.pt")
        dist.barrier()
    dist.destroy_process_group()


def warm_up(optimizer: Any) -> None:
    """Compile on one rank, so that the others load the compiled units."""
    if dist.get_rank() == 0:
        optimizer.warmup()
    dist.barrier()
