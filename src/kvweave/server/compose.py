"""From settings to a server's state: the model is loaded here."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from kvweave.llm import LLM
from kvweave.models.sources import default_home
from kvweave.reuse.gate import Gates, GateStore, gate_settings
from kvweave.server.health import gate_states
from kvweave.server.keys import SCOPES, Caller, KeyRing, digest_of, read_keys
from kvweave.server.metrics import ServerMetrics
from kvweave.server.request_log import RequestLog
from kvweave.server.segments import SegmentDirectory
from kvweave.server.settings import ServerSettings
from kvweave.server.state import ServerState
from kvweave.tools import get_parser, pick_parser

_WORKERS = 4


def make_state(
    settings: ServerSettings, *, home: Path | None = None, progress: Callable[[str], None] | None = None
) -> ServerState:
    """Raises ``ConfigError``s before anything is loaded, then ``ModelError``s."""
    keys = make_keys(settings)
    named = None if settings.tool_parser in ("auto", "none") else get_parser(settings.tool_parser)
    options = settings.engine_options(home, psutil.virtual_memory().total)
    requests = RequestLog(settings.request_log)
    llm = LLM(settings.model, progress=progress, **options)
    llm.loop.max_queue = settings.max_queue
    gates = Gates(
        GateStore(home or default_home()),
        llm.built.fingerprint,
        gate_settings(llm.config),
        force=settings.gate == "force",
    )
    picked = pick_parser(llm.tokenizer.chat_template or "", llm.engine.parts.adapter.config.model_type)
    return ServerState(
        settings=settings,
        llm=llm,
        keys=keys,
        gates=gates,
        requests=requests,
        metrics=ServerMetrics(settings.served_model_name or llm.name, llm.engine, lambda: gate_states(gates)),
        segments=SegmentDirectory(llm),
        tool_parser=get_parser(picked) if settings.tool_parser == "auto" and picked is not None else named,
        workers=ThreadPoolExecutor(_WORKERS, thread_name_prefix="kvweave-server"),
    )


def make_keys(settings: ServerSettings) -> KeyRing:
    """Raises ``ConfigError`` for a key file that can't be used."""
    if settings.api_key_file is not None:
        return KeyRing(read_keys(settings.api_key_file))
    if settings.api_key is not None:
        caller = Caller("default", "default", frozenset(("infer", "cache")))
        return KeyRing({digest_of(settings.api_key): caller})
    return KeyRing({}, anonymous=Caller("anonymous", "default", frozenset(SCOPES)))
