"""The application: routes and what stands in front of them. ``create_app`` makes one for each server."""

from __future__ import annotations

from functools import cache

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from kvweave import __version__
from kvweave.errors import KvweaveError
from kvweave.server import cache_routes, chat, completions, health, text_routes
from kvweave.server.describe import document_of
from kvweave.server.failures import on_bad_parameter, on_error, on_http_error
from kvweave.server.front import Front
from kvweave.server.state import ServerState


def create_app(state: ServerState) -> FastAPI:
    """An ASGI application over a loaded model; several may live in one process."""
    pages = state.settings.loopback
    app = FastAPI(
        title="kvweave",
        version=__version__,
        description="OpenAI's interface over decoder LLMs that reuse KV cache wherever text repeats.",
        docs_url="/docs" if pages else None,
        redoc_url=None,
        openapi_url="/openapi.json" if pages else None,
    )
    app.state.server = state
    app.openapi = cache(lambda: document_of(app))  # type: ignore[method-assign]
    for router in (chat.router, completions.router, text_routes.router, cache_routes.router, health.router):
        app.include_router(router)
    app.add_exception_handler(KvweaveError, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_bad_parameter)
    app.add_middleware(Front, state=state)
    return app
