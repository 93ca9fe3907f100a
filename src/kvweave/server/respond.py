"""From jobs to a response, whole or streamed: what chat and completions have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvweave.core.report import Delta, Output
from kvweave.errors import KvweaveError, ReuseRefused
from kvweave.protocol.cache import CacheOptions
from kvweave.protocol.errors import error_json
from kvweave.protocol.usage import counts_json, usage_json
from kvweave.server.accounts import record
from kvweave.server.front import LOG, note_of
from kvweave.server.keys import Caller
from kvweave.server.prepare import Job, owners_of
from kvweave.server.running import Answers, while_connected
from kvweave.server.sse import DONE, EventStream, event, with_comments
from kvweave.server.state import Answered, ServerState

T = TypeVar("T")


class Form(Protocol):
    """How an endpoint writes answers. ``more``: ``usage``, ``cache``, ``timings``."""

    def whole(self, outputs: Sequence[Sequence[Output]], **more: Any) -> dict[str, Any]:
        """``outputs`` of each prompt."""
        ...

    def chunk(self, prompt: int, piece: Delta, **more: Any) -> dict[str, Any]: ...

    def tail(self, **more: Any) -> dict[str, Any]:
        """A chunk without choices."""
        ...


@dataclass(frozen=True)
class Accepted:
    """A body that can be answered."""

    jobs: tuple[Job, ...]
    form: Form
    cache: CacheOptions
    ignored: tuple[str, ...]
    operations: int
    stream: bool
    include_usage: bool
    continuous_usage: bool


async def on_worker(state: ServerState, work: Callable[..., T], *args: Any) -> T:
    """What ``work(*args)`` returns, off the event loop."""
    return await asyncio.get_running_loop().run_in_executor(state.workers, work, *args)


async def respond(
    state: ServerState, request: Request, caller: Caller, start: float, accept: Callable[[], Accepted]
) -> Response:
    """Run a request. ``accept`` checks and prepares it, on a worker thread; ``start``: when its last byte had come.

    Nothing is sent before the first token is there (or, with keep-alive comments, the request is queued), so that what
    goes wrong until then has a status of its own.
    """
    with ExitStack() as open_until_sent:
        open_until_sent.enter_context(state.keys.running(caller))
        answers = Answers(state.loop, start)
        open_until_sent.callback(answers.close)
        accepted = await while_connected(request, _begin(state, accept, answers))
        answer = _Answer(state, request, accepted, answers)
        headers = {"x-kvweave-ignored": ", ".join(accepted.ignored)} if accepted.ignored else {}
        state.ignored.tell(accepted.ignored)
        if not accepted.stream:
            return JSONResponse(await while_connected(request, answer.whole()), headers=headers)
        if state.settings.keepalive:
            events = with_comments(answer.events(), state.settings.keepalive)
        else:
            events = await while_connected(request, answer.begun())
        return EventStream(events, open_until_sent.pop_all().close, headers)


async def _begin(state: ServerState, accept: Callable[[], Accepted], answers: Answers) -> Accepted:
    def begin() -> Accepted:
        accepted = accept()
        for job in accepted.jobs:
            state.segments.check_pins(job.exchange)
        answers.submit([job.request for job in accepted.jobs])
        return accepted

    return await on_worker(state, begin)


class _Answer:
    """One answer while it is made."""

    def __init__(self, state: ServerState, request: Request, accepted: Accepted, answers: Answers) -> None:
        self._state = state
        self._note = note_of(request)
        self._accepted = accepted
        self._answers = answers
        self._tokens = 0

    async def whole(self) -> dict[str, Any]:
        async for _ in self._pieces():
            pass
        outputs, more = await self._account()
        return self._accepted.form.whole(outputs, **more)

    async def begun(self) -> AsyncIterator[bytes]:
        """The events, once the first one is there; what goes wrong until then is raised."""
        pieces = self._pieces()
        first = await anext(pieces)
        return self._events(pieces, first)

    def events(self) -> AsyncIterator[bytes]:
        return self._events(self._pieces())

    async def _events(
        self, pieces: AsyncIterator[tuple[int, Delta]], first: tuple[int, Delta] | None = None
    ) -> AsyncIterator[bytes]:
        accepted = self._accepted
        try:
            if first is not None:
                yield self._chunk(*first)
            async for prompt, piece in pieces:
                yield self._chunk(prompt, piece)
            _, more = await self._account()
            if accepted.include_usage or accepted.cache.given:
                yield event(accepted.form.tail(**more))
        except Exception as error:  # there is no status to send any more
            yield event(self._failure(error))
        yield DONE

    def _chunk(self, prompt: int, piece: Delta) -> bytes:
        self._tokens += piece.token_id is not None
        more = {}
        if self._accepted.continuous_usage:
            prompts = sum(len(job.exchange.prompt.token_ids) for job in self._accepted.jobs)
            more["usage"] = counts_json(prompts, self._tokens)
        return event(self._accepted.form.chunk(prompt, piece, **more))

    def _failure(self, error: Exception) -> dict[str, Any]:
        if not isinstance(error, KvweaveError):
            LOG.exception("unexpected error in request %s", self._note.request_id)
        _, body, _ = error_json(error, self._note.request_id)
        self._note.fields["error"] = body["error"]["code"]
        self._state.metrics.failed(body["error"]["code"])
        return body

    async def _pieces(self) -> AsyncIterator[tuple[int, Delta]]:
        begun: set[int] = set()
        async for prompt, piece in self._answers.pieces():
            if prompt not in begun:
                begun.add(prompt)
                self._refuse_fallback(prompt)
            yield prompt, piece

    def _refuse_fallback(self, prompt: int) -> None:
        """What the caches lack turns out at lookup."""
        lookup = self._answers.sequences[prompt].lookup
        reason = None if lookup is None else lookup.fallback_reason
        asked = self._accepted.jobs[prompt].exchange.asked  # with auto it is the server's choice
        if self._accepted.cache.fallback == "refuse" and asked == "fused" and reason is not None:
            raise ReuseRefused(
                f"fallback=refuse, but this request ran exact ({reason}). "
                "Store its documents first with POST /v1/cache/warm, or send fallback=allow."
            )

    async def _account(self) -> tuple[list[tuple[Output, ...]], dict[str, Any]]:
        """Outputs by prompt, and what stands beside the choices."""
        accepted = self._accepted
        answered = self._answers.answered()
        explained = await on_worker(self._state, self._record, answered)
        outputs = [each.outputs for each in answered]
        reports = [each[0].reuse for each in outputs]
        completion = sum(len(output.token_ids) for each in outputs for output in each)
        usage = usage_json(reports, completion, accepted.operations)
        details = usage["prompt_tokens_details"]
        self._note.fields |= {
            "asked": accepted.jobs[0].exchange.asked,
            "ran": reports[0].ran,
            "reason": reports[0].fallback_reason or "-",
            **{name: count for name, count in details.items() if count},
            "completion_tokens": completion,
        }
        more: dict[str, Any] = {"usage": usage}
        if accepted.cache.explain:
            more["cache"] = explained[0] | {"prompts": explained[1:]} if len(explained) > 1 else explained[0]
        if accepted.cache.timings:
            more["timings"] = _timings(answered)
        return outputs, more

    def _record(self, answered: Sequence[Answered]) -> list[dict[str, Any]]:
        state = self._state
        exchanges = [replace(job.exchange, owners=owners_of(state, job.rendered)) for job in self._accepted.jobs]
        return [record(state, exchange, one) for exchange, one in zip(exchanges, answered, strict=True)]


def _timings(answered: Sequence[Answered]) -> dict[str, float]:
    """Milliseconds of the first prompt, as the engine and the client saw it."""
    first = answered[0]
    report = first.outputs[0].reuse
    tokens, decoding = sum(len(o.token_ids) for o in first.outputs), first.total - first.first_token
    return {
        **report.timings,
        "load_ms": sum(load.load_ms for load in report.loads.values()),
        "ttft_ms": first.first_token * 1e3,
        "total_ms": first.total * 1e3,
        "tokens_per_second": (tokens - len(first.outputs)) / decoding if decoding > 0 else 0.0,
    }
