"""Bodies of requests, as pydantic models: they check types and describe the interface in OpenAPI."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvweave.core.sampling import MAX_LOGPROBS, MAX_STOP_LENGTH, MAX_STOP_STRINGS
from kvweave.errors import InvalidRequest, UnsupportedContent, UnsupportedParameter
from kvweave.protocol.cache_bodies import CacheBreakpoint, CacheControl, CacheFields, Mark
from kvweave.protocol.validation import refuse

_NOTHING: tuple[Any, ...] = (None, [], {}, "")
_INSTEAD = {
    "functions": "Send tools.",
    "function_call": "Send tool_choice.",
    "audio": "Leave it out: answers are text.",
    "prediction": "Leave it out.",
    "web_search_options": "Leave it out, and put what was found into the messages.",
    "moderation": "Leave it out, and check texts in the client.",
    "segments": "Mark content parts, or send documents.",
    "documents": "Send segments.",
    "return_token_ids": "Ask /tokenize, or send logprobs.",
}
_CONTENT = {
    "image_url": "images",
    "input_image": "images",
    "image": "images",
    "input_audio": "audio",
    "audio": "audio",
    "file": "files",
    "video_url": "video",
    "refusal": "refusals",
}

Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0)]


class Open(BaseModel):
    """An object in which an unknown key is named to the caller and otherwise ignored."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class Part(Open):
    """A piece of a message's content: text."""

    type: str = Field(json_schema_extra={"enum": ["text"]})
    text: str
    cache: Mark | None = None
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None

    @field_validator("type")
    @classmethod
    def _text_only(cls, value: str) -> str:
        if value != "text":
            what = _CONTENT.get(value, "parts of this type")
            raise refuse(UnsupportedContent, f"{{path}}: {what} can't be read here. Send parts of type 'text' alone.")
        return value


class FunctionCall(Open):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Open):
    """A call that the assistant made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Function(Open):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("strict")
    @classmethod
    def _not_strict(cls, value: bool | None) -> bool | None:
        if value:
            raise refuse(
                UnsupportedParameter, "{path}: true is not supported. Send false, and check arguments in the client."
            )
        return value


class Tool(Open):
    type: Literal["function"]
    function: Function


class Message(Open):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    cache: Any = Field(default=None, description="Not here but on content parts.", json_schema_extra={"enum": [None]})

    @field_validator("cache")
    @classmethod
    def _marks_on_parts(cls, value: Any) -> Any:
        if value is not None:
            raise refuse(
                InvalidRequest,
                "{path}: marks belong on content parts, since gateways drop unknown keys of a message. "
                'Send [{"type": "text", "text": ..., "cache": ...}] as its content.',
            )
        return value


class DocumentBody(Open):
    """A document of a RAG request: a segment ``doc:<doc_id>``."""

    text: str
    title: str | None = None
    doc_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._:@-]{1,124}$")
    cache: Mark | None = None


class StreamOptions(Open):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Open):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormatBody(Open):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationFields(CacheFields):
    """What chat and completions have in common."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = Field(default=None, ge=0, le=100, description="1.0 if left out, as OpenAI's; 0 is greedy.")
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    skip_special_tokens: bool | None = None
    n: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: Any = None
    user: Any = Field(default=None, description="Accepted, no effect.")
    metadata: dict[str, Any] | None = Field(default=None, description="Accepted, no effect.")
    store: Any = Field(default=None, description="Accepted, no effect.")
    service_tier: Any = Field(default=None, description="Accepted, no effect.")
    priority: Any = Field(default=None, description="Accepted, no effect.")
    safety_identifier: Any = Field(default=None, description="Accepted, no effect.")
    extra_body: Any = Field(default=None, description="A client's wrapper: its content belongs at the top level.")

    @field_validator("return_token_ids")
    @classmethod
    def _no_ids(cls, value: Any) -> Any:
        return None if value is False else _unsupported(value, "return_token_ids")


class ChatCompletionBody(GenerationFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    documents: list[DocumentBody] | None = None
    max_completion_tokens: int | None = Field(default=None, ge=0, description="Another name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = None
    tool_choice: Any = Field(default=None, json_schema_extra={"enum": ["none", "auto", None]})
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormatBody | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(default=None, max_length=64)
    modalities: list[str] | None = None
    verbosity: Any = Field(default=None, description="Accepted, no effect.")
    segments: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    moderation: Any = None

    @field_validator("segments", "functions", "function_call", "audio", "prediction", "web_search_options", "moderation")
    @classmethod
    def _not_here(cls, value: Any, info: Any) -> Any:
        return _unsupported(value, info.field_name)

    @field_validator("tool_choice")
    @classmethod
    def _free_choice(cls, value: Any) -> Any:
        if value in (None, "none", "auto"):
            return value
        shown = f"'{value}'" if value == "required" else "this choice"
        raise refuse(
            UnsupportedParameter, f"{{path}} {shown} is not supported here. Use 'auto' and check the answer in the client."
        )

    @field_validator("parallel_tool_calls")
    @classmethod
    def _parallel(cls, value: bool | None) -> bool | None:
        if value is False:
            raise refuse(UnsupportedParameter, "{path}: false is not supported. Leave it out, and use the first call alone.")
        return value

    @field_validator("modalities")
    @classmethod
    def _text_answers(cls, value: list[str] | None) -> list[str] | None:
        if value and value != ["text"]:
            raise refuse(UnsupportedParameter, '{path}: answers are text alone. Send ["text"] or leave it out.')
        return value


class SegmentBody(Open):
    """A piece of a completion's prompt."""

    text: str
    cache: Mark | None = None


class CompletionBody(GenerationFields):
    """Body of ``POST /v1/completions``: a ``prompt``, or ``segments``."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]] | None = None
    segments: list[SegmentBody] | None = None
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    documents: Any = None
    suffix: Any = None
    best_of: int | None = None

    @field_validator("documents", "suffix")
    @classmethod
    def _not_here(cls, value: Any, info: Any) -> Any:
        return _unsupported(value, info.field_name)

    @field_validator("best_of")
    @classmethod
    def _no_best_of(cls, value: int | None) -> int | None:
        if value not in (None, 1):
            raise refuse(UnsupportedParameter, "{path} is not supported. Send n, and choose in the client.")
        return value


class TokenizeBody(Open):
    """Body of ``POST /tokenize``: a ``prompt``, or ``messages`` to be rendered."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    documents: list[DocumentBody] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(default=None, max_length=64)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Open):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[TokenId]


def _unsupported(value: Any, field: str) -> None:
    if value not in _NOTHING:
        hint = _INSTEAD.get(field, "Leave it out.")
        raise refuse(UnsupportedParameter, f"{{path}} is not supported here. {hint}")
