"""Compile units, with a log line before the compilation and, in ``warmup()`` on a terminal, a progress bar."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from compiled_optim.backends import Backend, Batch, Signature
from compiled_optim.diagnostics.text import counted
from compiled_optim.diagnostics.units import UnitLog
from compiled_optim.torch_private import is_compiler_imported

logger = logging.getLogger("compiled_optim")

Units = Mapping[Signature, Backend]

# measured on two cores; the message says "about"
COMPILER_IMPORT_SECONDS = 3.0
NEW_DIRECTORY_SECONDS = 4.0
BAR_WIDTH = 20


def compile_units(optimizer: str, batches: Sequence[Batch], log: UnitLog, late: bool, bar: bool = False) -> None:
    """Compile all units of these batches that are not compiled yet; record all units in ``log``.

    ``late`` is True if the optimizer has made a step before.
    """
    needed = {call.signature: batch.backend for batch in batches for call in batch.calls}
    new = {signature: backend for signature, backend in needed.items() if backend.needs_compile(signature)}
    with announced(optimizer, new, bar) as before_unit:
        for signature, backend in needed.items():
            if signature in new:
                before_unit(signature)
            unit = backend.get_unit(signature)
            if backend.compiles:
                log.record(signature, unit, signature in new, late)


@contextmanager
def announced(optimizer: str, units: Units, bar: bool) -> Iterator[Callable[[Signature], None]]:
    """Log that these units will be compiled; yield a function to call before each of them."""
    if units:
        logger.info("%s", announcement(optimizer, units))
    start, done = time.perf_counter(), 0
    show = bool(units) and bar

    def before(signature: Signature | str) -> None:
        nonlocal done
        if show:
            marks = "#" * (BAR_WIDTH * done // len(units))
            seconds = time.perf_counter() - start
            # back to the start of the line, and clear it
            progress = f"[{marks:-<{BAR_WIDTH}}] {done}/{len(units)} {seconds:.0f} s {signature}"
            sys.stderr.write(f"\r\x1b[K{optimizer} {progress}")
            sys.stderr.flush()
        done += 1

    yield before
    if show:
        before("ready")
        sys.stderr.write("\n")


def _is_filled(directory: Path) -> bool:
    return directory.is_dir() and any(directory.iterdir())


def announcement(optimizer: str, units: Units) -> str:
    """Return the log line: what will be compiled or loaded, the expected time, and the cache directory."""
    devices = ", ".join(dict.fromkeys(signature.device for signature in units))
    caches = dict.fromkeys(cache for backend in units.values() if (cache := backend.cache_directory()) is not None)
    new = {signature: backend for signature, backend in units.items() if not backend.is_cached(signature)}
    where = ", ".join(map(str, caches))
    if not new:
        return f"loading {counted(len(units), 'unit')} for {optimizer} on {devices} from {where}"
    seconds = sum(backend.seconds_per_unit for backend in new.values())
    seconds += COMPILER_IMPORT_SECONDS * (not is_compiler_imported())
    seconds += NEW_DIRECTORY_SECONDS * any(not _is_filled(cache) for cache in caches)
    rest = f" ({len(units) - len(new)} more from disk)" if len(new) < len(units) else ""
    kept = f"; cached afterwards in {where}" if caches else ""
    return f"compiling {counted(len(new), 'unit')}{rest} for {optimizer} on {devices}, about {seconds:.0f} s{kept}"
