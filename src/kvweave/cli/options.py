"""Options that several commands share, and what they mean together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvweave.cli.environment import disk_tier_from_environment, remote_tiers_from_environment
from kvweave.cli.output import LEVELS, set_log_level
from kvweave.config import Tiers
from kvweave.errors import InvalidOption

ENGINE = "Engine"
SAMPLING = "Answer"
REUSE = "Reuse"
TIERS = "Tiers"
_SHORTEST_SECRET = 16


def _set_log_level(level: str) -> str:
    if level not in LEVELS:
        raise typer.BadParameter(f"'{level}' is not one of {', '.join(LEVELS)}.")
    set_log_level(level)
    return level


LogLevel = Annotated[
    str,
    typer.Option(
        "--log-level", callback=_set_log_level, is_eager=True, help="debug, info, warning or error; debug shows traces."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON document.")]
Model = Annotated[
    str, typer.Option(help="'demo', a model directory, a .gguf or .whl file, or a hub name.", show_default=True)
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
Threads = Annotated[str, typer.Option(help="CPU threads; auto measures.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest prompt plus answer, in tokens.", rich_help_panel=ENGINE)]
KvPool = Annotated[str, typer.Option(help="Memory for KV of the prompt, such as 2GiB.", rich_help_panel=ENGINE)]
ChunkCache = Annotated[str, typer.Option(help="Memory for KV of the documents.", rich_help_panel=ENGINE)]
DiskTier = Annotated[
    str | None,
    typer.Option(
        "--disk-tier",
        metavar="DIR[:SIZE]",
        help="Keep KV of documents in this folder, at most SIZE (10GiB). Default: KVWEAVE_DISK_TIER; '' turns it off.",
        rich_help_panel=TIERS,
    ),
]
RemoteTier = Annotated[
    list[str] | None,
    typer.Option(
        "--remote-tier",
        metavar="URL",
        help="redis://... or s3://...; may be repeated. Default: KVWEAVE_REMOTE_TIER; '' turns it off.",
        rich_help_panel=TIERS,
    ),
]
Codec = Annotated[
    str, typer.Option(help="How KV is kept: raw, int8 or fp8 (the last two are lossy).", rich_help_panel=TIERS)
]
Tenant = Annotated[str, typer.Option(help="Whose KV it is; nobody finds another's.", rich_help_panel=TIERS)]
SecretFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="16 bytes or more that key the tenants' names and keys.", rich_help_panel=TIERS),
]
Controller = Annotated[
    Literal["auto", "paper", "off"],
    typer.Option(help="Who sets the ratio where KV has to be loaded; off: the technique.", rich_help_panel=TIERS),
]


def tiers_of(disk: str | None, remote: Sequence[str] | None, codec: str, secret_file: Path | None) -> Tiers:
    """The tiers that options and environment name; an option beats the environment."""
    folder = disk_tier_from_environment() if disk is None else disk or None
    urls = remote_tiers_from_environment() if remote is None else tuple(url for url in remote if url)
    if secret_file is not None:
        read_secret(secret_file)  # told before a model is loaded
    tiers = Tiers(disk=folder, remote=urls, codec=codec, secret_file=secret_file)
    if folder is None:
        return tiers
    root, capacity = tiers.disk_folder()
    return replace(tiers, disk=f"{root.absolute()}:{capacity}")


def read_secret(path: Path | None) -> bytes:
    """Raises ``InvalidOption`` if the file can't be read or is too short."""
    if path is None:
        return b""
    try:
        secret = path.read_bytes()
    except OSError as error:
        raise InvalidOption(f"The secret file '{path}' can't be read: {error.strerror}. Check its path.") from error
    if len(secret) < _SHORTEST_SECRET:
        raise InvalidOption(f"The secret file '{path}' has {len(secret)} bytes. Use {_SHORTEST_SECRET} or more.")
    return secret


def threads_of(text: str) -> int | str:
    return int(text) if text.isdecimal() else text
