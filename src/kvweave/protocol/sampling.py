"""Sampling parameters and stream options of a body."""

from __future__ import annotations

from typing import Any

from kvweave.core.sampling import SamplingParams
from kvweave.errors import InvalidOption, InvalidRequest
from kvweave.protocol.bodies import GenerationFields
from kvweave.protocol.limits import Limits

UNLIMITED = 2**31 - 1
"""``max_tokens`` of a request that names none: the engine clips it to the room left in the context."""

_SAME_NAME = (
    *("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens"),
)


def sampling_params(body: GenerationFields, *, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """What isn't in the body has the default of OpenAI's interface: temperature 1.0, not the greedy one of the library.

    Raises ``InvalidRequest``.
    """
    given: dict[str, Any] = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            logprobs=logprobs,
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
            logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
            **given,
        )
    except InvalidOption as error:
        raise InvalidRequest(str(error), param=error.param) from error


def samples(body: GenerationFields, limits: Limits) -> int:
    count = 1 if body.n is None else body.n
    if count > limits.samples:
        raise InvalidRequest(f"n: at most {limits.samples}, got {count}. Send several requests.", param="n")
    return count


def stream_usage(body: GenerationFields) -> tuple[bool, bool]:
    """Whether usage is wanted in a last chunk, and in every chunk. Raises ``InvalidRequest`` without a stream."""
    options = body.stream_options
    if options is None:
        return False, False
    if not body.stream:
        raise InvalidRequest("stream_options are for streams. Send stream: true, or leave them out.", param="stream_options")
    return bool(options.include_usage), bool(options.continuous_usage_stats)
