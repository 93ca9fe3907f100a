"""Every error kvweave raises on purpose, as one tree.

Each message is one line that says what is wrong and what to do. ``code`` is the stable machine name, ``exit_code`` what the
command line returns (1 failed or interrupted, 2 usage or configuration, 3 a check ran and the answer is no).

::

    KvweaveError
    ├── ConfigError                   unusable configuration (exit 2)
    │   ├── UnknownOption             a key or name that doesn't exist, with a suggestion
    │   ├── InvalidOption             a known key with a value outside its range
    │   ├── UnknownTechnique
    │   └── MissingExtra              an optional dependency isn't installed
    ├── RequestError                  this request can't run; others are not affected (HTTP 400)
    │   ├── InvalidRequest
    │   ├── UnsupportedParameter      a known field with a value that isn't supported
    │   ├── UnsupportedContent        a content part that isn't text
    │   ├── UnknownCacheField
    │   ├── ConflictingFields         two spellings of one thing, or two things that contradict each other
    │   ├── InvalidDrop
    │   ├── InvalidReposition
    │   ├── TemplateRefused           the chat template refuses these messages
    │   ├── ContextLengthExceeded
    │   ├── PromptExceedsPool
    │   ├── RequestTooLarge           (413)
    │   ├── UnsupportedMediaType      (415)
    │   └── RequestAborted            stopped from outside: the engine was closed, or a request in its batch failed (503)
    ├── AccessError                   who asks may not (401, 403)
    │   ├── MissingApiKey
    │   ├── InvalidApiKey
    │   ├── ScopeMissing
    │   └── RateLimited               (429)
    ├── NotFound                      (404)
    │   ├── UnknownModel
    │   ├── SegmentNotFound
    │   └── RequestNotFound
    ├── Conflict                      it can't be done as asked in the state things are in (409)
    │   ├── ReuseRefused
    │   ├── RestoreLimit
    │   ├── PinQuotaExceeded
    │   └── TenantBusy
    ├── Unavailable                   not now (503)
    │   ├── Overloaded
    │   ├── Loading
    │   └── Draining
    ├── DocumentError                 a document file can't be used
    ├── ModelError
    │   ├── ModelNotFound
    │   ├── BrokenModel               files are missing, truncated or don't fit together
    │   ├── UnsupportedModel          the architecture is refused, with the reason
    │   └── SelfCheckFailed           our path and the model's own forward disagree (exit 3)
    ├── StoreError                    a store folder or remote tier can't be used as asked
    │   └── LoadFailed                stored KV didn't arrive (requests fall back)
    ├── NotEnoughSpace                no room on disk for the model cache
    └── InternalError                 an invariant of kvweave itself is broken: please report
        ├── PlanError
        └── IntegrityError
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KvweaveError(Exception):
    """Base class; catching it catches everything kvweave raises on purpose."""

    code = "error"
    exit_code = 1
    http_status = 500
    error_type = "server_error"
    param: str | None = None
    """The field of the request that is wrong, where it is one."""
    retry_after: float | None = None
    """Seconds after which trying again makes sense (429 and 503)."""

    def __init__(self, message: str = "", *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after = retry_after


class ConfigError(KvweaveError):
    code = "config_error"
    exit_code = 2
    http_status = 400  # where a request names what the configuration knows, a technique say
    error_type = "invalid_request_error"


class UnknownOption(ConfigError):
    code = "unknown_option"

    def __init__(self, name: str, known: Iterable[str], where: str) -> None:
        super().__init__(f"'{name}' is not an option of {where}. {suggest(name, known)}")


class InvalidOption(ConfigError):
    code = "invalid_option"


class UnknownTechnique(ConfigError):
    code = "unsupported_technique"

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"Technique '{name}' is unknown. {suggest(name, known)}")


class MissingExtra(ConfigError):
    code = "missing_extra"

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs '{package}', which is not installed. Run: pip install 'kvweave[{extra}]'")


class RequestError(KvweaveError):
    code = "invalid_request"
    http_status = 400
    error_type = "invalid_request_error"


class InvalidRequest(RequestError):
    code = "invalid_request"


class UnsupportedParameter(RequestError):
    code = "unsupported_parameter"


class UnsupportedContent(RequestError):
    code = "unsupported_content"


class UnknownCacheField(RequestError):
    code = "unknown_cache_field"


class ConflictingFields(RequestError):
    code = "conflicting_fields"


class InvalidDrop(RequestError):
    code = "invalid_drop"


class InvalidReposition(RequestError):
    code = "invalid_reposition"


class TemplateRefused(RequestError):
    code = "template_error"


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"


class PromptExceedsPool(RequestError):
    code = "prompt_exceeds_pool"


class RequestTooLarge(RequestError):
    code = "request_too_large"
    http_status = 413


class UnsupportedMediaType(RequestError):
    code = "unsupported_media_type"
    http_status = 415


class RequestAborted(RequestError):
    code = "request_aborted"
    http_status = 503
    error_type = "server_error"


class AccessError(KvweaveError):
    code = "permission_error"
    http_status = 403
    error_type = "permission_error"


class MissingApiKey(AccessError):
    code = "missing_api_key"
    http_status = 401
    error_type = "authentication_error"


class InvalidApiKey(AccessError):
    code = "invalid_api_key"
    http_status = 401
    error_type = "authentication_error"


class ScopeMissing(AccessError):
    code = "scope_missing"


class RateLimited(AccessError):
    code = "rate_limited"
    http_status = 429
    error_type = "rate_limit_error"


class NotFound(KvweaveError):
    code = "not_found"
    http_status = 404
    error_type = "not_found_error"


class UnknownModel(NotFound):
    code = "model_not_found"


class SegmentNotFound(NotFound):
    code = "segment_not_found"


class RequestNotFound(NotFound):
    code = "request_not_found"


class Conflict(KvweaveError):
    code = "conflict"
    http_status = 409
    error_type = "conflict_error"


class ReuseRefused(Conflict):
    code = "reuse_refused"


class RestoreLimit(Conflict):
    code = "restore_limit"


class PinQuotaExceeded(Conflict):
    code = "pin_quota_exceeded"


class TenantBusy(Conflict):
    code = "tenant_busy"


class Unavailable(KvweaveError):
    code = "unavailable"
    http_status = 503
    error_type = "server_error"


class Overloaded(Unavailable):
    code = "overloaded"


class Loading(Unavailable):
    code = "loading"


class Draining(Unavailable):
    code = "draining"


class DocumentError(KvweaveError):
    code = "bad_document"


class ModelError(KvweaveError):
    code = "model_error"


class ModelNotFound(ModelError):
    code = "model_not_found"


class BrokenModel(ModelError):
    code = "broken_model"


class UnsupportedModel(ModelError):
    code = "unsupported_model"


class SelfCheckFailed(ModelError):
    code = "self_check_failed"
    exit_code = 3


class StoreError(KvweaveError):
    code = "store_error"


class LoadFailed(StoreError):
    """Stored KV didn't arrive, for a ``reason`` of ``kvweave.store.base.MissReason``. Requests fall back and go on."""

    code = "load_failed"

    def __init__(self, reason: str, tier: str) -> None:
        super().__init__(f"A load from tier '{tier}' failed: {reason}. Check the tier with kvweave cache verify.")
        self.reason = reason
        self.tier = tier


class NotEnoughSpace(KvweaveError):
    code = "not_enough_space"


class InternalError(KvweaveError):
    code = "internal_error"


class PlanError(InternalError):
    code = "bad_plan"


class IntegrityError(InternalError):
    code = "integrity_error"


def suggest(name: str, known: Iterable[str]) -> str:
    """``Did you mean 'x'? Known: ...`` for a misspelt ``name``; never raises."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f"Did you mean '{close[0]}'? " if close else ""
    return f"{hint}Known: {', '.join(names)}."
