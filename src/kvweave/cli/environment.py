"""The only place that reads environment variables; the library never does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvweave.server.settings import HOME, check_environment

DISK_TIER = "KVWEAVE_DISK_TIER"
REMOTE_TIER = "KVWEAVE_REMOTE_TIER"


def home_from_environment(environ: Mapping[str, str] | None = None) -> Path | None:
    """The folder for models that ``KVWEAVE_HOME`` names, or None for the default.

    A misspelt ``KVWEAVE_*`` variable would be without effect and without a word, so any unknown one raises
    ``ConfigError``.
    """
    environ = os.environ if environ is None else environ
    check_environment(environ)
    home = environ.get(HOME)
    return Path(home).expanduser() if home else None


def disk_tier_from_environment(environ: Mapping[str, str] | None = None) -> str | None:
    """``DIR`` or ``DIR:SIZE`` of ``KVWEAVE_DISK_TIER``, or None."""
    return (os.environ if environ is None else environ).get(DISK_TIER) or None


def remote_tiers_from_environment(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The URLs of ``KVWEAVE_REMOTE_TIER``, white space between them."""
    return tuple((os.environ if environ is None else environ).get(REMOTE_TIER, "").split())
