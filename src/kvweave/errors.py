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
    ├── RequestError                  this request can't run; others are not affected
    │   ├── InvalidRequest
    │   ├── ContextLengthExceeded
    │   ├── PromptExceedsPool
    │   └── RequestAborted            stopped from outside: the engine was closed, or a request in its batch failed
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


class ConfigError(KvweaveError):
    code = "config_error"
    exit_code = 2


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


class InvalidRequest(RequestError):
    code = "invalid_request"


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"


class PromptExceedsPool(RequestError):
    code = "prompt_exceeds_pool"


class RequestAborted(RequestError):
    code = "request_aborted"


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
