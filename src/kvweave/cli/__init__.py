"""The command line. ``kvweave --help`` lists its commands.

Importing it loads neither torch nor transformers.
"""

from __future__ import annotations

from kvweave.cli.entry import main

__all__ = ["main"]
