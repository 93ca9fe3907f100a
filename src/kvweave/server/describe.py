"""The OpenAPI document: what routes take and answer, in the words of the protocol's own models."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kvweave.protocol.bodies import ChatCompletionBody, CompletionBody, DetokenizeBody, TokenizeBody

BODIES: tuple[type[BaseModel], ...] = (ChatCompletionBody, CompletionBody, TokenizeBody, DetokenizeBody)
_REF = "#/components/schemas/{model}"
_STRING = {"type": "string"}
_ERROR = {
    "type": "object",
    "description": "What is wrong, and what to do.",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _STRING,
                "type": _STRING,
                "param": {"type": ["string", "null"]},
                "code": _STRING,
            },
        }
    },
}
_ERRORS = {
    400: "The request can't be used.",
    401: "There is no valid API key.",
    403: "The key may not do this, or the server is for its own machine alone.",
    404: "There is no such model or object.",
    409: "It can't be done in the state things are in.",
    413: "The body is too large.",
    415: "The body isn't application/json.",
    429: "The key runs as many requests as it may. Retry-After says when to come back.",
    500: "An error nobody foresaw.",
    503: "Overloaded, loading or shutting down. Retry-After says when to come back.",
}


def takes(name: str) -> dict[str, Any]:
    """``openapi_extra`` of a route whose body is the model ``name`` of the protocol."""
    content = {"application/json": {"schema": {"$ref": _REF.format(model=name)}}}
    return {"requestBody": {"required": True, "content": content}}


def answers(kind: str | None = None, *, stream: bool = False) -> dict[int | str, dict[str, Any]]:
    """``responses`` of a route: a JSON object, whose ``object`` is ``kind``, or else an error."""
    schema: dict[str, Any] = {"type": "object"}
    if kind is not None:
        schema |= {"required": ["object"], "properties": {"object": {"type": "string", "enum": [kind]}}}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if stream:
        content["text/event-stream"] = {"schema": _STRING}
    described: dict[int | str, dict[str, Any]] = {200: {"description": "Done.", "content": content}}
    return described | {status: {"description": text} for status, text in _ERRORS.items()}


def document_of(app: FastAPI) -> dict[str, Any]:
    """The document of an application. It says nothing about the model that is served."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    _, models = models_json_schema([(model, "validation") for model in BODIES], ref_template=_REF)
    components = document.setdefault("components", {})
    components["schemas"] = {**models["$defs"], "Error": _ERROR}
    components["responses"] = {str(status): _error_response(text) for status, text in _ERRORS.items()}
    for operations in document["paths"].values():
        for operation in operations.values():
            _refer_to_errors(operation["responses"])
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}, {}]
    return document


def _error_response(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}}


def _refer_to_errors(responses: dict[str, Any]) -> None:
    """All endpoints have the same errors, which stand in the document once."""
    responses.pop("422", None)  # FastAPI's own, which ours never is
    for status in responses:
        if int(status) in _ERRORS:
            responses[status] = {"$ref": f"#/components/responses/{status}"}
