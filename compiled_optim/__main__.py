"""``python -m compiled_optim``: see ``cli``."""

from __future__ import annotations

import sys

from compiled_optim.cli import main

if __name__ == "__main__":
    sys.exit(main())
