"""One streamed chat completion, timed: from the first byte sent to the first chunk with choices, and on to the last."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

UNREACHED, BROKEN, TIMED_OUT, NO_ANSWER = "connection_error", "stream_broken", "timeout", "no_answer"
_LONGEST_MESSAGE = 300


@dataclass(frozen=True)
class Exchange:
    """What one request cost and brought. Times are seconds; ``sent_at`` is a ``time.perf_counter()``.

    ``error`` is the code the server gave (or its HTTP status, or one of this module's), with what it said in ``message``.
    ``details`` are the counts of ``usage.prompt_tokens_details``. ``cpu_to_first_s``: server CPU seconds until the first
    token, where a ``clock`` was given.
    """

    sent_at: float
    ttft_s: float | None = None
    e2e_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    """Between chunks with text, so from the second of them on."""
    prompt_tokens: int | None = None
    output_tokens: int = 0
    details: Mapping[str, int] = field(default_factory=dict)
    finish_reason: str | None = None
    text: str = ""
    error: str | None = None
    message: str = ""
    cpu_to_first_s: float | None = None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token behind the first."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


async def exchange(
    client: httpx.AsyncClient, url: str, body: Mapping[str, Any], clock: Callable[[], float] | None = None
) -> Exchange:
    """Send ``body`` and read its stream to the end. What goes wrong is an ``error`` of the result; nothing is raised.

    Args:
        clock: reads the server's CPU seconds.
    """
    timer = _Timer(clock)
    try:
        async with client.stream("POST", url, json=body, extensions={"trace": timer.watch}) as response:
            timer.status = response.status_code
            if response.is_error:
                await response.aread()
                timer.refused(response.status_code, _json(response.text))
                return timer.result()
            async for data in _events(response):
                timer.event(data)
                if timer.error is not None:
                    break
    except httpx.TimeoutException as error:
        timer.fail(TIMED_OUT, f"{type(error).__name__} after {timer.elapsed():.0f} s")
    except httpx.TransportError as error:
        timer.fail(UNREACHED if timer.status is None else BROKEN, str(error) or type(error).__name__)
    return timer.result()


class _Timer:
    """Turns what arrives into an :class:`Exchange`."""

    def __init__(self, clock: Callable[[], float] | None) -> None:
        self._clock = clock
        self._start = time.perf_counter()
        self._cpu_at_start = clock() if clock else 0.0
        self._first: float | None = None
        self._last = self._start
        self._last_text: float | None = None
        self._gaps: list[float] = []
        self._texts: list[str] = []
        self._usage: Mapping[str, Any] = {}
        self._finish: str | None = None
        self._cpu: float | None = None
        self.status: int | None = None
        self.error: str | None = None
        self._message = ""

    async def watch(self, name: str, _info: Mapping[str, Any]) -> None:
        """Of httpx: connecting isn't part of the request's time."""
        if name.endswith("send_request_headers.started"):
            self._start = self._last = time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    def event(self, data: Any) -> None:
        now = time.perf_counter()
        if not isinstance(data, dict):
            self.fail(BROKEN, "a data line of the stream is no JSON object")
            return
        if data.get("error"):
            self.refused(self.status, data)
            return
        self._usage = data.get("usage") or self._usage
        if not data.get("choices"):
            return
        if self._first is None:
            self._first = now
            if self._clock is not None:
                self._cpu = self._clock() - self._cpu_at_start
        self._last = now
        choice = data["choices"][0]
        self._finish = choice.get("finish_reason") or self._finish
        delta = choice.get("delta") or {}
        text = delta.get("content") or ""
        if not (text or delta.get("reasoning_content") or delta.get("tool_calls")):
            return  # a role or a finish reason alone is no token
        self._texts.append(text)
        if self._last_text is not None:
            self._gaps.append(now - self._last_text)
        self._last_text = now

    def refused(self, status: int | None, answer: Any) -> None:
        error = answer.get("error") if isinstance(answer, dict) else None
        if not isinstance(error, dict):
            error = {"message": str(error or answer)}
        code = error.get("code") or error.get("type") or status
        self.fail(str(code), str(error.get("message") or ""))

    def fail(self, code: str, message: str) -> None:
        self.error, self._message = code, message[:_LONGEST_MESSAGE]

    def result(self) -> Exchange:
        if self.error is None and self._first is None:
            self.fail(NO_ANSWER, "the stream ended without a chunk with choices")
        if self.error is not None:
            return Exchange(self._start, e2e_s=self.elapsed(), error=self.error, message=self._message)
        details = self._usage.get("prompt_tokens_details") or {}
        return Exchange(
            self._start,
            ttft_s=None if self._first is None else self._first - self._start,
            e2e_s=self._last - self._start,
            gaps_s=tuple(self._gaps),
            prompt_tokens=self._usage.get("prompt_tokens"),
            output_tokens=self._usage.get("completion_tokens", len(self._texts)),
            details={name: count for name, count in details.items() if isinstance(count, int)},
            finish_reason=self._finish,
            text="".join(self._texts),
            cpu_to_first_s=self._cpu,
        )


async def _events(response: httpx.Response) -> AsyncIterator[Any]:
    """The data of a stream of server-sent events, parsed, up to ``[DONE]``."""
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            data = line[5:].strip()
            if data == "[DONE]":
                return
            yield _json(data)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
