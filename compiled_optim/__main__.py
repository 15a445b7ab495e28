"""Run ``cli.main`` for ``python -m compiled_optim``."""

from __future__ import annotations

import sys

from compiled_optim.cli import main

if __name__ == "__main__":
    sys.exit(main())
