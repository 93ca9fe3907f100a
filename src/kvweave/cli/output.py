"""What the command line shows: results on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

LOG = logging.getLogger("kvweave")
LEVELS = ("debug", "info", "warning", "error")
PIPE_WIDTH = 120  # columns of a table that goes to a file or a pipe


def complain(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    with contextlib.suppress(OSError):  # a closed stderr must not hide the exit code
        print(f"kvweave: {' '.join(message.split())}", file=sys.stderr, flush=True)


def set_log_level(level: str) -> None:
    """Log lines of kvweave go to stderr; the libraries below it stay silent unless the level is debug."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    LOG.handlers = [handler]
    LOG.propagate = False
    LOG.setLevel(level.upper())
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if level == "debug":
        os.environ["TRANSFORMERS_VERBOSITY"] = "debug"


def apart(as_json: bool) -> contextlib.AbstractContextManager[object]:
    """With JSON on stdout, whatever else is printed goes to stderr."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def print_json(document: Any) -> None:
    """The one JSON document of a ``--json`` run; ASCII, so that no encoding can break it."""
    print(json.dumps(document, indent=2, allow_nan=False))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows of plain text under ``columns``; colours follow NO_COLOR and the terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)


@dataclass(frozen=True)
class Progress:
    """Shown on stderr, only where a person looks at it; otherwise the same goes to the log."""

    quiet: bool = False

    @property
    def live(self) -> bool:
        return sys.stderr.isatty() and not self.quiet

    @contextlib.contextmanager
    def status(self, text: str) -> Iterator[Callable[[str], None]]:
        """A line that changes while something without a known length goes on."""
        LOG.info(text)
        if not self.live:
            yield LOG.info
            return
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True).status(Text(text)) as status:
            yield lambda line: status.update(Text(line))

    @contextlib.contextmanager
    def bar(self, text: str, total: int) -> Iterator[Callable[[str], None]]:
        """A bar of ``total`` steps; call the result with a log line after each."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Bar(*columns, console=Console(stderr=True), transient=True, disable=not self.live) as bar:
            task = bar.add_task(text, total=total)

            def step(line: str) -> None:
                LOG.info(line)
                bar.advance(task)

            yield step
