"""Answers that are JSON: a schema becomes a mask over the vocabulary at every step, computed by llguidance."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from kvweave.core.sampling import Constraint, ConstraintFactory
from kvweave.errors import InvalidRequest, MissingExtra, UnsupportedParameter
from kvweave.models.tokenizer import Tokenizer

_PARAM = "response_format"
# A model that is forced into JSON may else answer with white space until max_tokens.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"


class GrammarCompiler:
    """Compiles what answers must look like, for one tokenizer. Thread-safe; made once, as it reads the whole vocabulary.

    Compiling a schema takes about a millisecond, a very large one 0.1 s; a mask takes some ten microseconds.

    Args:
        eos_ids: tokens that may end an answer.

    Raises:
        MissingExtra: llguidance isn't installed.
        UnsupportedParameter: this tokenizer isn't one of the tokenizers library.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: Collection[int]) -> None:
        try:
            import llguidance
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise MissingExtra("llguidance", "structured", "A response_format other than text") from error
        self._library = llguidance
        try:
            self._vocabulary = from_tokenizer(tokenizer.backend, eos_token=sorted(eos_ids) or None)
        except ValueError as error:
            raise UnsupportedParameter(
                f"response_format can't be used with this model's tokenizer: {error}. Use text, and check the answer.",
                param=_PARAM,
            ) from error

    def json_object(self) -> ConstraintFactory:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: Mapping[str, Any]) -> ConstraintFactory:
        """JSON that is valid for ``schema``. Raises ``InvalidRequest`` if it is malformed, unsatisfiable or uses keywords
        that can't be kept."""
        library = self._library
        try:
            text = json.dumps(dict(schema), allow_nan=False)
            grammar = library.LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": _WHITESPACE})
        except (TypeError, ValueError, RecursionError) as error:
            raise _refused(str(error)) from error
        limits = library.LLParserLimits(verbose_errors=False)  # the verbose ones repeat the answer
        matcher = library.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(matcher.get_error())

        def start() -> Constraint:
            return _Matcher(matcher.deep_copy())

        return start


class _Matcher:
    """A ``Constraint`` over a matcher of llguidance, which never raises: after an error it only says that there was one."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def finished(self) -> bool:
        return bool(self._matcher.is_stopped())

    def allowed(self) -> bytes:
        mask: bytes = self._matcher.compute_bitmask()
        self._check()
        return mask

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequest(
                f"The answer can't follow response_format further: {_line(self._matcher.get_error())}. Simplify the schema.",
                param=_PARAM,
            )


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"response_format: this schema can't be used: {_line(reason)}. Change it.", param=_PARAM)


def _line(text: str) -> str:
    return text.strip().split("\n")[0][:200].rstrip(". ")
