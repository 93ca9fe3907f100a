"""``python -m kvweave`` is the ``kvweave`` command."""

from __future__ import annotations

import sys

from kvweave.cli import main

if __name__ == "__main__":
    sys.exit(main())
