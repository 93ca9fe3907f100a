"""``kvweave serve`` and ``kvweave config``. Bodies import what they need."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvweave.cli.environment import home_from_environment
from kvweave.cli.options import ENGINE, REUSE, TIERS, Json, LogLevel
from kvweave.cli.output import LOG, Progress, print_json, print_table

if TYPE_CHECKING:
    from kvweave.server.settings import Resolved
    from kvweave.server.state import ServerState

ACCESS = "Access"
LIMITS = "Limits and logs"

config = typer.Typer(rich_markup_mode="rich", help="The settings of kvweave serve.", no_args_is_help=True)

Config = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="YAML with the same names: 'disk_tier: DIR:100GiB'.")
]


def _flag(help: str, panel: str | None = None, *names: str, metavar: str | None = None) -> Any:
    """An option that is None unless it is given: then the environment, the file or the default says."""
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar, show_default=False)


def serve(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="'demo', a model directory, a .gguf file or a hub name.", show_default=False),
    ] = None,
    host: Annotated[str | None, _flag("Address to listen on. Default: 127.0.0.1.", ACCESS)] = None,
    port: Annotated[int | None, _flag("Default: 8000.", ACCESS)] = None,
    api_key: Annotated[str | None, _flag("One key, for the tenant 'default'. Better: KVWEAVE_API_KEY.", ACCESS)] = None,
    api_key_file: Annotated[
        Path | None, _flag("YAML: name, sha256, tenant, scopes, limits of each key.", ACCESS, metavar="FILE")
    ] = None,
    insecure: Annotated[bool | None, _flag("Serve other machines without a key.", ACCESS, "--insecure")] = None,
    served_model_name: Annotated[str | None, _flag("What clients call the model.")] = None,
    max_model_len: Annotated[int | None, _flag("Longest prompt plus answer, in tokens.", ENGINE)] = None,
    dtype: Annotated[str | None, _flag("auto, float32 or bfloat16.", ENGINE)] = None,
    device: Annotated[str | None, _flag("auto, cpu, cuda or cuda:N.", ENGINE)] = None,
    threads: Annotated[str | None, _flag("CPU threads; auto measures.", ENGINE)] = None,
    max_num_seqs: Annotated[int | None, _flag("Most sequences that run at a time. Default: 256.", ENGINE)] = None,
    chat_template: Annotated[Path | None, _flag("Jinja file, instead of the model's own.", ENGINE, metavar="FILE")] = None,
    content_format: Annotated[
        Literal["auto", "string", "parts"] | None, _flag("How the template gets the parts of a message.", ENGINE)
    ] = None,
    tool_parser: Annotated[
        str | None, _flag("Format of tool calls; auto: by the template; none: they stay text.", ENGINE)
    ] = None,
    kv_pool: Annotated[str | None, _flag("Memory for KV of running requests and exact prefixes.", ENGINE)] = None,
    host_tier: Annotated[str | None, _flag("Memory for KV of documents: a size, or a share such as 10%.", TIERS)] = None,
    disk_tier: Annotated[str | None, _flag("Keep KV of documents in this folder.", TIERS, metavar="DIR[:SIZE]")] = None,
    remote_tier: Annotated[
        list[str] | None, _flag("redis://... or s3://...; may be repeated.", TIERS, metavar="URL")
    ] = None,
    codec: Annotated[str | None, _flag("How KV is kept: raw, int8 or fp8 (the last two are lossy).", TIERS)] = None,
    secret_file: Annotated[
        Path | None, _flag("Keys the tenants' keys; the same on machines that share a tier.", TIERS)
    ] = None,
    reuse: Annotated[
        Literal["exact", "fused", "auto", "off"] | None,
        _flag("What a request gets that doesn't say. Default: exact.", REUSE),
    ] = None,
    no_fused: Annotated[bool | None, _flag("Never fuse, whatever requests ask for.", REUSE, "--no-fused")] = None,
    technique: Annotated[
        str | None, _flag("For fused requests that name none, as NAME or NAME:option=value.", REUSE)
    ] = None,
    recompute_ratio: Annotated[float | None, _flag("Its share of reused tokens computed again, 0 to 1.", REUSE)] = None,
    max_divergence: Annotated[
        float | None, _flag("Fuse only below this measured divergence, in nats. Default: 0.05.", REUSE)
    ] = None,
    gate: Annotated[
        Literal["auto", "force"] | None, _flag("force: fuse without a measurement. For experiments.", REUSE)
    ] = None,
    max_queue: Annotated[int | None, _flag("Most requests that wait; more get 503. Default: 256.", LIMITS)] = None,
    max_body: Annotated[str | None, _flag("Largest body. Default: 16MiB.", LIMITS)] = None,
    request_log: Annotated[
        Path | None, _flag("Keep explanations in this file. Default: in memory.", LIMITS, metavar="FILE")
    ] = None,
    strict_fields: Annotated[bool | None, _flag("Refuse unknown fields.", LIMITS, "--strict-fields")] = None,
    sse_keepalive: Annotated[
        str | None, _flag("Time between comments in a silent stream. Default: 0, none.", LIMITS)
    ] = None,
    drain_timeout: Annotated[str | None, _flag("Time that running requests have at SIGTERM. Default: 30s.", LIMITS)] = None,
    log_format: Annotated[Literal["text", "json"] | None, _flag("Default: text.", LIMITS)] = None,
    config: Config = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no table.")] = False,
    log_level: LogLevel = "info",
) -> None:
    """Serve a model with OpenAI's interface. Every flag is also KVWEAVE_NAME and a key of --config.

    kvweave serve demo --port 8000
    """
    given = {name: value for name, value in locals().items() if value is not None}
    flags = {name: value for name, value in given.items() if name not in ("config", "quiet", "log_level")}
    run(_resolve(flags, config), quiet=quiet)


@config.command("show")
def show_config(config: Config = None, json: Json = False, log_level: LogLevel = "warning") -> None:
    """What kvweave serve would use, and where each value comes from. Secrets are hidden."""
    rows = _resolve({}, config).rows()
    if json:
        print_json({name: {"value": value, "origin": origin} for name, value, origin in rows})
    else:
        print_table("Settings", ("setting", "value", "from"), rows)


def _resolve(flags: dict[str, Any], file: Path | None) -> Resolved:
    from kvweave.server.settings import resolve

    home_from_environment()  # a misspelt variable stops the start
    return resolve(flags, os.environ, file)


def run(resolved: Resolved, *, quiet: bool) -> None:
    """Bind, load, serve until a signal."""
    from kvweave.server.lifecycle import bind, serve, url_of

    settings = resolved.settings
    if settings.log_format == "json":
        from kvweave.server.logs import JsonFormatter

        for handler in LOG.handlers:
            handler.setFormatter(JsonFormatter())
    with bind(settings) as bound:
        progress = Progress(quiet)
        with progress.status(f"Loading {settings.model}") as report:
            from kvweave.server.compose import make_state

            state = make_state(settings, home=home_from_environment(), progress=report)

        def started() -> None:
            if not quiet:
                print_table("kvweave", ("", ""), _table(state, url_of(bound)))
            LOG.info("serving %s at %s", state.model_name, url_of(bound))

        serve(state, bound, started)


def _table(state: ServerState, url: str) -> list[tuple[str, str]]:
    from kvweave.cli.units import show_bytes
    from kvweave.server.health import gate_states

    built, settings, pool = state.llm.built, state.settings, state.llm.engine.parts.pool
    layout = state.llm.engine.parts.adapter.layout
    tiers = [f"host {show_bytes(int(state.llm.config.chunk_cache))}", *state.tiers_up()]
    gates = [f"{name} {gate}" for name, gate in gate_states(state.gates).items() if gate != "closed"]
    return [
        ("model", f"{state.model_name} ({built.fingerprint.short})"),
        ("device", f"{built.device}, {str(built.dtype).removeprefix('torch.')}, {built.attention}"),
        ("KV pool", f"{pool.num_slots:,} tokens, {show_bytes(pool.num_slots * layout.bytes_per_token)}"),
        ("tiers", ", ".join(tiers)),
        ("reuse", settings.reuse + (", fused reuse is off" if settings.no_fused else "")),
        ("gates", ", ".join(gates) or "all closed: kvweave eval gate MODEL --technique NAME"),
        ("keys", "none: everybody on this machine may ask" if state.keys.open else "needed"),
        ("URL", url),
    ]
