"""One streamed request, timed piece by piece, against any OpenAI-compatible server."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from kvweave.bench.workloads import Call
from kvweave.errors import KvweaveError


class Unreachable(KvweaveError):
    """The server to be measured doesn't answer."""

    code = "unreachable"


@dataclass(frozen=True)
class Target:
    """What is asked, and how. ``parts``: documents are content parts with marks, which only kvweave knows."""

    url: str
    model: str
    api_key: str | None = None
    parts: bool = False
    output_tokens: int = 32
    body: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 600.0

    def request(self, call: Call) -> dict[str, Any]:
        """The body of a chat completion."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*call.history, {"role": "user", "content": self._content(call)}],
            "max_tokens": self.output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        return body | dict(self.body)

    def _content(self, call: Call) -> str | list[dict[str, Any]]:
        if not self.parts or not call.documents:
            return "\n".join([*(text for _, text in call.documents), call.question])
        parts: list[dict[str, Any]] = [
            {"type": "text", "text": text, "cache": {"segment": label}} for label, text in call.documents
        ]
        return [*parts, {"type": "text", "text": call.question}]


@dataclass(frozen=True)
class Row:
    """One request as it was seen. Times in seconds; ``start`` since the run began."""

    index: int
    start: float
    ttft: float | None = None
    """From the first byte sent to the first chunk with choices."""
    total: float = 0.0
    chunks: tuple[float, ...] = ()
    """When each chunk with choices came, since the request was sent."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    usage: dict[str, int] = field(default_factory=dict)
    """Token classes, where the server tells them."""
    error: str | None = None
    cpu: float | None = None
    """CPU seconds of the server until the first chunk, where nothing else ran."""

    @property
    def tpot(self) -> float | None:
        """Seconds per token behind the first."""
        if self.ttft is None or self.output_tokens < 2 or len(self.chunks) < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"tpot": self.tpot}


def open_client(target: Target) -> httpx.AsyncClient:
    headers = {} if target.api_key is None else {"Authorization": f"Bearer {target.api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=target.url.rstrip("/"), headers=headers, timeout=target.timeout, limits=limits)


async def describe(url: str, api_key: str | None) -> dict[str, Any]:
    """The first model of ``/v1/models``; raises ``Unreachable``."""
    async with open_client(Target(url, "", api_key, timeout=20.0)) as client:
        try:
            answer = await client.get("/v1/models")
            answer.raise_for_status()
            models = answer.json()["data"]
            return dict(models[0])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise Unreachable(f"{url} doesn't answer /v1/models: {error or type(error).__name__}. Is it running?") from error


async def measure(client: httpx.AsyncClient, target: Target, call: Call, index: int, start: float) -> Row:
    """Send one request and time its chunks. What goes wrong is in ``Row.error``."""
    sent = time.perf_counter()
    chunks: list[float] = []
    usage: dict[str, Any] = {}
    error: str | None = None
    try:
        async with client.stream("POST", "/v1/chat/completions", json=target.request(call)) as answer:
            if answer.status_code != 200:
                error = _code(answer.status_code, await answer.aread())
            else:
                async for event in _events(answer):
                    if "error" in event:
                        error = str(_as_dict(event["error"]).get("code") or "error")
                    if event.get("choices"):
                        chunks.append(time.perf_counter() - sent)
                    usage = _as_dict(event.get("usage")) or usage
    except httpx.HTTPError as failure:
        error = type(failure).__name__
    details = _as_dict(usage.get("prompt_tokens_details"))
    return Row(
        index=index,
        start=sent - start,
        ttft=chunks[0] if chunks and error is None else None,
        total=time.perf_counter() - sent,
        chunks=tuple(chunks),
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        output_tokens=int(usage.get("completion_tokens") or len(chunks)),
        usage={name: value for name, value in details.items() if isinstance(value, int)},
        error=error if error is not None or chunks else "empty",
    )


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """JSON of the stream's events, until [DONE]."""
    async for line in answer.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            continue  # not ours to judge: an answer without chunks is counted as empty
        if isinstance(event, dict):
            yield event


def _code(status: int, body: bytes) -> str:
    try:
        error = json.loads(body).get("error")
    except (ValueError, AttributeError):
        return f"HTTP {status}"
    code = error.get("code") if isinstance(error, dict) else None
    return f"HTTP {status} {code}" if code else f"HTTP {status}"


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
