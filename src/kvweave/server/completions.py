"""``POST /v1/completions``."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvweave.core.report import Delta, Output
from kvweave.errors import UnsupportedParameter
from kvweave.protocol.completions import CompletionRequest, parse_completion
from kvweave.protocol.responses import Head, TokenText, completion_choice, completion_logprobs, echoed
from kvweave.server.access import Infer, parse_json, server_of
from kvweave.server.describe import answers, takes
from kvweave.server.front import note_of
from kvweave.server.prepare import Arrival, Job, Wanted, check_model, completion_job
from kvweave.server.respond import Accepted, respond
from kvweave.server.state import ServerState

router = APIRouter()
PATH = "/v1/completions"


@router.post(PATH, openapi_extra=takes("CompletionBody"), responses=answers("text_completion", stream=True))
async def completions(request: Request, caller: Infer) -> Response:
    """Go on with one or several prompts, whole or as a stream of events."""
    state = server_of(request)
    raw = await request.body()
    arrival = Arrival(f"cmpl-{secrets.token_hex(12)}", note_of(request).request_id, PATH, caller)
    headers = dict(request.headers)
    return await respond(state, request, caller, arrival.start, lambda: _accept(state, arrival, raw, headers))


def _accept(state: ServerState, arrival: Arrival, raw: bytes, headers: Mapping[str, str]) -> Accepted:
    call = parse_completion(parse_json(raw), headers, state.limits, state.settings.strict_fields)
    check_model(state, call.model)
    logprobs = call.sampling.logprobs
    if call.stream and call.echo and logprobs is not None:
        raise UnsupportedParameter(
            "echo with logprobs isn't streamed. Send stream: false, or leave one of the two out.", param="echo"
        )
    wanted = Wanted(
        sampling=call.sampling,
        cache=call.cache,
        samples=call.samples,
        ignored=call.ignored,
        operations=call.operations,
        prompt_logprobs=logprobs if call.echo else None,
    )
    jobs = tuple(_job(state, arrival, i, prompt, wanted) for i, prompt in enumerate(call.prompts))
    prompts = [_prompt_text(state, job, call, i) for i, job in enumerate(jobs)] if call.echo else None
    return Accepted(
        jobs=jobs,
        form=CompletionForm(state.head(arrival.id), call.samples, None if logprobs is None else state.token_text, prompts),
        cache=call.cache,
        ignored=call.ignored,
        operations=call.operations,
        stream=call.stream,
        include_usage=call.include_usage,
        continuous_usage=call.continuous_usage,
    )


def _job(state: ServerState, arrival: Arrival, index: int, prompt: Any, wanted: Wanted) -> Job:
    """The prompts behind the first have ids of their own, so that each can be explained."""
    one = arrival if not index else replace(arrival, id=f"{arrival.id}-{index}")
    return completion_job(state, one, prompt, wanted)


def _prompt_text(state: ServerState, job: Job, call: CompletionRequest, index: int) -> str:
    prompt = call.prompts[index]
    if isinstance(prompt, str):
        return prompt
    return state.llm.tokenizer.decode(job.exchange.prompt.token_ids, skip_special_tokens=call.sampling.skip_special_tokens)


class CompletionForm:
    """OpenAI's objects for a list of prompts. ``prompts``: their texts, if they are part of the answer."""

    def __init__(
        self, head: Head, samples: int, token_text: TokenText | None = None, prompts: Sequence[str] | None = None
    ) -> None:
        self._head = head
        self._samples = samples
        self._token_text = token_text
        self._prompts = prompts
        self._lengths: dict[int, int] = {}

    def whole(self, outputs: Sequence[Sequence[Output]], **more: Any) -> dict[str, Any]:
        return self._head.completion([self._choice(p, o) for p, each in enumerate(outputs) for o in each], **more)

    def chunk(self, prompt: int, piece: Delta, **more: Any) -> dict[str, Any]:
        """One sampled token."""
        index = prompt * self._samples + piece.index
        text, logprobs = piece.text, None
        if index not in self._lengths and self._prompts is not None:
            text = self._prompts[prompt] + text
        offset = self._lengths.setdefault(index, 0)
        if self._token_text is not None and piece.logprob is not None:
            logprobs = completion_logprobs([piece.logprob.token_id], [piece.logprob], self._token_text, offset)
            self._lengths[index] += len(logprobs["tokens"][0])
        reason = None if piece.output is None else piece.output.finish_reason
        return self._head.completion([completion_choice(index, text, reason, logprobs)], **more)

    def tail(self, **more: Any) -> dict[str, Any]:
        return self._head.completion([], **more)

    def _choice(self, prompt: int, output: Output) -> dict[str, Any]:
        text, logprobs = output.text, None
        if self._prompts is not None:
            text, logprobs = echoed(output, self._prompts[prompt], self._token_text)
        elif self._token_text is not None:
            logprobs = completion_logprobs(output.token_ids, output.logprobs or (), self._token_text)
        return completion_choice(prompt * self._samples + output.index, text, output.finish_reason, logprobs)
