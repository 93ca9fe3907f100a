"""The OpenAPI document: checked in, and true for whatever is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kvweave.server.app import create_app
from kvweave.server.describe import document_of
from tests.server.live import Live, live_server

CHECKED_IN = Path(__file__).parents[2] / "docs" / "openapi.json"
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def live(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_server(tiny_model_dir, tmp_path_factory.mktemp("home"), max_model_len=256) as server:
        yield server


def test_the_document_is_checked_in(live: Live) -> None:
    document = document_of(create_app(live.state))
    assert json.loads(CHECKED_IN.read_text()) == document, "Save what /openapi.json of a server answers, indented by 1."
    assert live.get("/openapi.json").json() == document


def test_every_endpoint_has_its_errors_and_a_description(live: Live) -> None:
    document = document_of(create_app(live.state))
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["responses"], (path, method)
            if path != "/metrics":
                assert {"200", "400", "500"} <= operation["responses"].keys(), (path, method)


def test_pages_are_for_this_machine_alone(tiny_model_dir: Path, tmp_path: Path) -> None:
    with live_server(tiny_model_dir, tmp_path, host="0.0.0.0", api_key="k") as live:
        url = live.url.replace("0.0.0.0", "127.0.0.1")
        assert Live(live.state, url).get("/docs").status_code == 404
        assert Live(live.state, url).get("/openapi.json").status_code == 404


def _cheap(case: schemathesis.Case) -> None:
    """Answers of any length would take the test's time, and tell nothing."""
    body: Any = case.body
    if isinstance(body, dict) and case.path.endswith("completions"):
        body["max_tokens"] = min(4, body["max_tokens"]) if isinstance(body.get("max_tokens"), int) else 2
        body.pop("max_completion_tokens", None)


def test_nothing_that_can_be_sent_is_a_server_error(live: Live) -> None:
    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    seen: set[str] = set()

    for result in schema.get_all_operations():
        operation = result.ok()
        strategy = operation.as_strategy()

        @hypothesis.given(case=strategy)
        @hypothesis.settings(
            max_examples=15,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        def fuzz(case: schemathesis.Case) -> None:
            _cheap(case)
            case.call_and_validate(checks=CHECKS, timeout=60)
            seen.add(case.path)

        fuzz()
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/models"} <= seen
    live.check()
