"""The server under load: where it is, what it serves, and the request bodies it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import httpx

from kvweave.bench.texts import Document
from kvweave.bench.workloads import Turn
from kvweave.errors import InvalidOption, KvweaveError, Unavailable, suggest

SEGMENTS = ("auto", "parts", "text")
Message = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """An OpenAI-compatible server. ``marked``: documents are sent as content parts with ``cache`` marks (kvweave), else as
    plain text; the text of the prompt is the same in both. ``body`` is merged into every request."""

    base: str
    """The URL up to and without ``/v1``."""
    model: str
    marked: bool = False
    output_tokens: int = 32
    ignore_eos: bool = True
    body: Mapping[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"{self.base}/v1/chat/completions"

    @property
    def precompute_url(self) -> str:
        return f"{self.base}/v1/cache/warm"

    def user_message(self, turn: Turn) -> Message:
        if not self.marked:
            return {"role": "user", "content": "\n".join([*(d.text for d in turn.documents), turn.question])}
        parts = [self._part(document) for document in turn.documents]
        return {"role": "user", "content": [*parts, {"type": "text", "text": turn.question}]}

    @staticmethod
    def _part(document: Document) -> Message:
        return {"type": "text", "text": document.text, "cache": {"kind": "document"}}

    def request(self, messages: Sequence[Message]) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), "max_tokens": self.output_tokens}
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | dict(self.body)

    def precompute_request(self, document: Document) -> dict[str, Any]:
        """For ``/v1/cache/warm``, which only kvweave has: computes the KV that fusion reuses."""
        messages = [{"role": "user", "content": [self._part(document)]}]
        return {"model": self.model, "messages": messages, **self.body, "what": "chunks"}

    def without_ignore_eos(self) -> Target:
        """For servers that refuse the field: answers may then be shorter than ``output_tokens``."""
        return replace(self, ignore_eos=False)


def base_of(url: str) -> str:
    """The URL of a server without ``/v1`` and what comes after it. Raises ``InvalidOption`` for what is no HTTP URL."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        known = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:  # a port that is no number
        known = False
    if not known:
        raise InvalidOption(f"--url '{url}' is no HTTP URL. Use one such as http://127.0.0.1:8000.")
    return f"{parts.scheme}://{parts.netloc}{parts.path.partition('/v1')[0].rstrip('/')}"


async def find_target(client: httpx.AsyncClient, url: str, model: str | None, segments: str) -> Target:
    """Ask the server what it serves. Without ``model``: the first it lists. ``segments``: one of ``SEGMENTS``; auto marks
    documents where the server says that it is kvweave.

    Raises ``Unavailable`` if nothing answers, ``InvalidOption`` for a model it doesn't have, ``KvweaveError`` for an answer
    that is no list of models.
    """
    base = base_of(url)
    try:
        response = await client.get(f"{base}/v1/models")
        response.raise_for_status()
        listed = {entry["id"]: entry for entry in response.json()["data"]}
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        raise KvweaveError(f"{base}/v1/models answers with HTTP {status}. Check --url and --api-key.") from error
    except httpx.TransportError as error:
        what = str(error) or type(error).__name__
        raise Unavailable(f"No server answers at {base} ({what}). Start it, or check --url.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise KvweaveError(f"{base}/v1/models answers with no list of models. Check --url.") from error
    name = model if model is not None else next(iter(listed), "")
    if name not in listed:
        raise InvalidOption(f"{base} doesn't serve the model '{name}'. {suggest(name, listed)}")
    marked = segments == "parts" or (segments == "auto" and "kvweave" in listed[name])
    return Target(base, name, marked)
