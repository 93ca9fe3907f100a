"""Every error has a status, a type and a stable code on the wire."""

from __future__ import annotations

import inspect
import json

import pytest

import kvweave.errors
from kvweave.errors import (
    ConfigError,
    InvalidRequest,
    KvweaveError,
    LoadFailed,
    MissingExtra,
    Overloaded,
    RateLimited,
    UnknownOption,
    UnknownTechnique,
)
from kvweave.protocol.errors import error_json

# A base class answers with its own row only where it is raised itself.
_WIRE = {
    "invalid_request": (400, "invalid_request_error"),
    "unsupported_parameter": (400, "invalid_request_error"),
    "unsupported_content": (400, "invalid_request_error"),
    "unknown_cache_field": (400, "invalid_request_error"),
    "conflicting_fields": (400, "invalid_request_error"),
    "invalid_drop": (400, "invalid_request_error"),
    "invalid_reposition": (400, "invalid_request_error"),
    "unsupported_technique": (400, "invalid_request_error"),
    "context_length_exceeded": (400, "invalid_request_error"),
    "prompt_exceeds_pool": (400, "invalid_request_error"),
    "template_error": (400, "invalid_request_error"),
    "missing_api_key": (401, "authentication_error"),
    "invalid_api_key": (401, "authentication_error"),
    "scope_missing": (403, "permission_error"),
    "permission_error": (403, "permission_error"),
    "model_not_found": (404, "not_found_error"),
    "segment_not_found": (404, "not_found_error"),
    "request_not_found": (404, "not_found_error"),
    "not_found": (404, "not_found_error"),
    "reuse_refused": (409, "conflict_error"),
    "restore_limit": (409, "conflict_error"),
    "pin_quota_exceeded": (409, "conflict_error"),
    "tenant_busy": (409, "conflict_error"),
    "conflict": (409, "conflict_error"),
    "request_too_large": (413, "invalid_request_error"),
    "unsupported_media_type": (415, "invalid_request_error"),
    "rate_limited": (429, "rate_limit_error"),
    "internal_error": (500, "server_error"),
    "overloaded": (503, "server_error"),
    "loading": (503, "server_error"),
    "draining": (503, "server_error"),
    "unavailable": (503, "server_error"),
    "request_aborted": (503, "server_error"),
}
_SPECIAL = {
    UnknownOption: UnknownOption("reus", ["reuse"], "a request"),
    UnknownTechnique: UnknownTechnique("epik", ["epic"]),
    MissingExtra: MissingExtra("llguidance", "structured", "response_format"),
    LoadFailed: LoadFailed("timeout", "disk"),
}
TREE = [c for _, c in inspect.getmembers(kvweave.errors, inspect.isclass) if issubclass(c, KvweaveError)]


@pytest.mark.parametrize("kind", TREE)
def test_every_error_has_a_row(kind: type[KvweaveError]) -> None:
    error = _SPECIAL.get(kind) or kind("What is wrong. What to do.", param="field")
    status, body, headers = error_json(error, "r-1")
    fields = body["error"]
    assert list(body) == ["error"]
    assert list(fields) == ["message", "type", "param", "code"]
    assert (status, fields["type"]) == _WIRE[fields["code"]]
    assert ("x-should-retry" in headers) == (400 <= status < 500 and status != 429)
    assert ("Retry-After" in headers) == (status in (429, 503))
    if status == 500:
        assert fields["message"].startswith("Unexpected error in request r-1.")  # what broke is the log's
    else:
        assert fields["message"] == str(error)


def test_the_tree_covers_the_table() -> None:
    codes = {error_json(_SPECIAL.get(kind) or kind("x"))[1]["error"]["code"] for kind in TREE}
    assert codes == set(_WIRE)


def test_codes_are_unique_among_leaves() -> None:
    leaves = [kind for kind in TREE if not kind.__subclasses__() and not issubclass(kind, ConfigError)]
    codes = [kind.code for kind in leaves if kind.http_status != 500]
    assert len(codes) == len(set(codes))


def test_what_nobody_foresaw_shows_nothing() -> None:
    status, body, headers = error_json(ZeroDivisionError("secret"), "r-9")
    assert status == 500
    assert "secret" not in json.dumps(body)
    assert "r-9" in body["error"]["message"]
    assert headers == {}


@pytest.mark.parametrize(("seconds", "header"), [(None, "1"), (0.2, "1"), (2.1, "3"), (1000, "60")])
def test_retry_after(seconds: float | None, header: str) -> None:
    for kind in (Overloaded, RateLimited):
        assert error_json(kind("Busy. Wait.", retry_after=seconds))[2]["Retry-After"] == header


def test_any_text_can_be_sent() -> None:
    _, body, _ = error_json(InvalidRequest("bad key '\ud800'"))
    json.dumps(body, ensure_ascii=False).encode()
