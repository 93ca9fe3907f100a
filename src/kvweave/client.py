"""For clients of a kvweave server: did the operations that were sent arrive? Needs nothing but the standard library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvweave.errors import KvweaveError

_MARKS = ("cache", "cache_control", "prompt_cache_breakpoint")


class OperationsLost(KvweaveError):
    """Something between client and server removed cache operations, so that the answer isn't what was asked for."""

    code = "operations_lost"


def count_ops(body: Mapping[str, Any]) -> int:
    """Cache operations in the body of a chat or completion request, as the server counts them.

    Message ids to drop, repositions, marks, documents and other fields of ``cache``, under any of their names. ``body`` is
    what goes over the wire, or the arguments of an OpenAI client, whose ``extra_body`` is looked into. Null and empty values
    are no operations.
    """
    body = {**body, **_object(body.get("extra_body"))}
    cache = _object(body.get("cache")) or _object(body.get("kv_cache"))
    rule, management = _object(body.get("drop_rule")), _object(body.get("context_management"))
    drops = (cache.get("drop"), body.get("drop_message"), rule.get("drop_messages"))
    other = [cache[key] for key in cache if key not in ("drop", "reposition")]
    other += [body.get("cache_control"), body.get("prompt_cache_retention")]
    other.append(_object(body.get("prompt_cache_options")).get("ttl"))
    parts = [p for m in _list(body.get("messages")) for p in _list(_object(m).get("content"))]
    parts += _list(body.get("segments"))
    marks = [_object(part).get(name) for part in parts for name in _MARKS]
    return (
        sum(len(_list(ids)) for drop in drops for ids in _object(drop).values())
        + sum(len(_list(ids)) for ids in (cache.get("reposition"), body.get("reposition"), management.get("edits")))
        + sum(value is not None for value in (*other, *marks))
        + len(_list(body.get("documents")))
    )


def check_delivery(body: Mapping[str, Any], response: Any) -> None:
    """Raise ``OperationsLost`` if fewer operations arrived than ``body`` has.

    ``response``: the answer, or the last chunk of a stream (the one with usage), as parsed JSON or as an object of the
    OpenAI client.
    """
    sent = count_ops(body)
    dump = getattr(response, "model_dump", None)
    answer = _object(dump() if callable(dump) else response)
    details = _object(_object(answer.get("usage")).get("prompt_tokens_details"))
    seen = details.get("cache_ops")
    if sent and seen is None:
        raise OperationsLost(
            f"Sent {sent} cache operations, but the answer does not say how many arrived (usage.prompt_tokens_details."
            "cache_ops). Either this is no kvweave server, or a gateway cuts usage: ask the server directly."
        )
    if isinstance(seen, int) and seen < sent:
        raise OperationsLost(
            f"Sent {sent} cache operations, the server saw {seen}. A gateway removed some: send kv_cache in place of cache, "
            "or the header X-KV-Cache."
        )


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
