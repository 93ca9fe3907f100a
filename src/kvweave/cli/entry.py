"""From the arguments to an exit code. Whatever goes wrong becomes one line on stderr.

0 fine · 1 failed or interrupted · 2 usage or configuration · 3 a check ran and the answer is no
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence

import typer

from kvweave.cli.output import complain, set_log_level
from kvweave.errors import KvweaveError

FAILED = 1
USAGE = 2
_TYPER_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Without arguments: the help."""
    set_log_level("warning")
    for stream in (sys.stdout, sys.stderr):  # an answer may hold characters that the terminal's encoding lacks
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv) or ["--help"])
        sys.stdout.flush()
    except BrokenPipeError:
        return _reader_has_gone()
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except Exception as error:
        return _failed(error)
    return _interrupted() if code == _TYPER_INTERRUPTED else code


def _run(args: list[str]) -> int:
    from kvweave.cli.app import app

    code = typer.main.get_command(app).main(args=args, prog_name="kvweave", standalone_mode=False)
    return int(code or 0)


def _failed(error: Exception) -> int:
    if logging.getLogger("kvweave").isEnabledFor(logging.DEBUG):
        traceback.print_exception(error)
    if isinstance(error, KvweaveError):
        complain(str(error))
        return error.exit_code
    if callable(usage := getattr(error, "format_message", None)):  # typer's own errors have no public base class
        path = getattr(getattr(error, "ctx", None), "command_path", "kvweave")
        complain(f"{usage().rstrip('.')}. See: {path} --help")
        return USAGE
    text = f"{type(error).__name__}: {error}"
    complain(f"Unexpected error ({' '.join(text.split())[:300]}). Rerun with --log-level debug for the trace.")
    return FAILED


def _interrupted() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not turn a clean end into a trace
    complain("Interrupted.")
    return FAILED


def _reader_has_gone() -> int:
    """Whoever read our output has closed it (``| head``): what is left goes nowhere, or Python complains at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED
