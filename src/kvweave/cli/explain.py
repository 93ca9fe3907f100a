"""``kvweave explain``: why a request to a running server hit or missed the caches."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from kvweave.cli.options import Json, LogLevel
from kvweave.cli.output import print_json, print_table
from kvweave.errors import KvweaveError, Unavailable

_TIMEOUT = 30.0  # seconds
_SHOWN_TIMES = ("queue_ms", "lookup_ms", "load_ms", "load_wait_ms", "prefill_ms", "ttft_ms", "decode_ms", "total_ms")


def explain(
    request: Annotated[
        str, typer.Argument(metavar="REQ", help="Id of an answer (chatcmpl-...), or its x-request-id.", show_default=False)
    ],
    other: Annotated[
        str | None, typer.Argument(metavar="REQ_B", help="Compare with this earlier request.", show_default=False)
    ] = None,
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token.", envvar="KVWEAVE_API_KEY")] = None,
    json: Json = False,
    log_level: LogLevel = "warning",
) -> None:
    """Why a request to a running server hit or missed the caches; with two of them, where their prompts part.

    kvweave explain chatcmpl-1f4e chatcmpl-09ab --url http://127.0.0.1:8000
    """
    told = _fetch(url, request, other, api_key)
    if json:
        print_json(told)
        return
    record = told["request"] if other is not None else told
    _show_record(record)
    if other is not None:
        _show_difference(record["id"], told["compared_with"]["id"], told["diverged"])


def _fetch(url: str, request: str, other: str | None, api_key: str | None) -> dict[str, Any]:
    """Raises ``InvalidOption`` for a URL that is none, ``Unavailable`` if nothing answers, ``KvweaveError`` for refusals."""
    import httpx

    from kvweave.bench.target import base_of

    base = base_of(url)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    params = {} if other is None else {"compare": other}
    try:
        path = f"{base}/v1/cache/requests/{quote(request, safe='')}"
        response = httpx.get(path, params=params, headers=headers, timeout=_TIMEOUT)
        body = response.json()
    except httpx.TransportError as error:
        what = str(error) or type(error).__name__
        raise Unavailable(f"No server answers at {base} ({what}). Start it, or check --url.") from error
    except ValueError as error:
        raise KvweaveError(f"{base} doesn't answer as a kvweave server does. Check --url.") from error
    if response.status_code != 200:
        message = body.get("error", {}).get("message") if isinstance(body, dict) else None
        raise KvweaveError(str(message or f"{base} answers with HTTP {response.status_code}. Check --url."))
    return dict(body)


def _show_record(record: dict[str, Any]) -> None:
    cache = record["cache"]
    fallback = f", because of {cache['fallback_reason']}" if cache["fallback_reason"] else ""
    gate = f"; gate {cache['gate']}" if cache["gate"] else ""
    tokens = " + ".join(f"{kind} {count:,}" for kind, count in record["tokens"].items())
    rows = [
        ("asked", cache["asked"]),
        ("ran", f"{cache['ran']} ({cache['technique']}{gate}){fallback}"),
        ("prompt", f"{record['prompt_tokens']:,} = {tokens}"),
        ("prefix", f"{cache['prefix']['hit_tokens']:,} tokens found"),
        ("left", _place(cache["prefix"]["diverged"]) or "-"),
        *(("ignored", ", ".join(cache["ignored"])) for _ in cache["ignored"][:1]),
        *(("warning", warning) for warning in cache["warnings"]),
        ("times", ", ".join(f"{n.removesuffix('_ms')} {record['timings'][n]:,.1f}" for n in _SHOWN_TIMES) + " ms"),
    ]
    print_table(f"Request {record['id']}", ("", ""), rows)
    if cache["segments"]:
        columns = ("segment", "kind", "message", "tokens", "result", "tier", "why", "how")
        print_table("Segments", columns, [_segment(segment) for segment in cache["segments"]])


def _segment(segment: dict[str, Any]) -> tuple[str, ...]:
    start, stop = segment["span"]
    message = "" if segment["message"] is None else str(segment["message"])
    how = ", ".join(f"{kind} {count:,}" for kind, count in segment["tokens"].items())
    why, tier = segment.get("reason", ""), segment.get("tier", "")
    return segment["segment"], segment["kind"], message, f"{stop - start:,}", segment["result"], tier, why, how


def _show_difference(request: str, other: str, difference: dict[str, Any] | None) -> None:
    text = _place(difference) or "One prompt is the beginning of the other, or they are the same."
    print_table(f"{request} against {other}", ("", ""), [("left", text)])


def _place(difference: dict[str, Any] | None) -> str | None:
    if difference is None:
        return None
    message = "" if difference["message"] is None else f", message {difference['message']}"
    segment = "" if difference["segment"] is None else f", segment {difference['segment']}"
    return f"{difference['reason']} at token {difference['token']:,}{message}{segment}: {difference['cost_tokens']:,} tokens"
