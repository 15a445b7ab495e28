"""What a person sees of compiling: a line in the log before it starts, and in ``warmup()`` a bar on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from compiled_optim.backends import Backend, Signature
from compiled_optim.events import counted, logger

Units = Mapping[Signature, Backend]

# measured on two cores; what is told is "about" so much
COMPILER_IMPORT_SECONDS = 3.0
NEW_DIRECTORY_SECONDS = 7.0
WIDTH = 20


@contextmanager
def told(optimizer: str, units: Units, bar: bool) -> Iterator[Callable[[Signature], None]]:
    """Tell that these units are about to be compiled; the function given is to be called before each of them."""
    if units:
        logger.info("%s", announcement(optimizer, units))
    start, done = time.perf_counter(), 0
    show = bool(units) and bar

    def before(signature: Signature | str) -> None:
        nonlocal done
        if show:
            marks = "#" * (WIDTH * done // len(units))
            seconds = time.perf_counter() - start
            # to the start of the line, and nothing left of what stood there
            sys.stderr.write(f"\r\x1b[K{optimizer} [{marks:-<{WIDTH}}] {done}/{len(units)} {seconds:.0f} s {signature}")
            sys.stderr.flush()
        done += 1

    yield before
    if show:
        before("ready")
        sys.stderr.write("\n")


def announcement(optimizer: str, units: Units) -> str:
    """What is going to happen, how long it may take, and where the results will be kept."""
    devices = ", ".join(dict.fromkeys(signature.device for signature in units))
    caches = dict.fromkeys(cache for backend in units.values() if (cache := backend.cache()) is not None)
    new = {signature: backend for signature, backend in units.items() if not backend.keeps(signature)}
    where = ", ".join(map(str, caches))
    if not new:
        return f"loading {counted(len(units), 'unit')} for {optimizer} on {devices} from {where}"
    seconds = sum(backend.seconds_per_unit for backend in new.values())
    seconds += COMPILER_IMPORT_SECONDS * ("torch._inductor.compile_fx" not in sys.modules)
    seconds += NEW_DIRECTORY_SECONDS * any(not any(cache.iterdir()) for cache in caches)
    rest = f" ({len(units) - len(new)} more from disk)" if len(new) < len(units) else ""
    kept = f"; cached afterwards in {where}" if caches else ""
    return f"compiling {counted(len(new), 'unit')}{rest} for {optimizer} on {devices}, about {seconds:.0f} s{kept}"
