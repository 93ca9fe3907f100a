"""Which reuse a request gets: what it asks for, what the server allows, what the quality gate says."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvweave.engine.sequence import Request
from kvweave.errors import ConflictingFields, ReuseRefused
from kvweave.protocol.cache import CacheOptions
from kvweave.reuse.base import Technique
from kvweave.reuse.gate import Asked, choose_mode
from kvweave.reuse.registry import DEFAULT_TECHNIQUE, make_technique, with_ratio
from kvweave.server.state import ServerState

_EXACT: dict[str, str] = {"off": "full", "exact": "prefix"}


@dataclass(frozen=True)
class Mode:
    """What runs. ``gate`` is the state of the gate of what was asked; None where no technique with a gate was."""

    asked: Asked
    technique: Technique
    gate: str | None = None
    fallback_reason: str | None = None
    refuse: bool = False
    """A fallback is an error."""

    @property
    def fuses(self) -> bool:
        return self.technique.reuse == "fused"

    def fall_back(self, reason: str) -> Mode:
        """The exact path instead. Raises ``ReuseRefused`` if the request wants no fallback."""
        if self.refuse:
            raise ReuseRefused(f"fallback=refuse, but this request would run exact ({reason}). Send fallback=allow.")
        return replace(self, technique=make_technique("prefix"), fallback_reason=None if self.asked == "auto" else reason)

    def applied(self, request: Request) -> Request:
        """``request``, which runs the technique, with what it is reported as."""
        return replace(request, asked=self.asked, fallback_reason=self.fallback_reason or request.fallback_reason)


def mode_of(state: ServerState, cache: CacheOptions) -> Mode:
    """Raises ``ConfigError``s for techniques and options that don't exist, ``ConflictingFields``, ``ReuseRefused``."""
    asked, technique = _asked(state, cache)
    if asked in _EXACT or technique.reuse != "fused":
        return Mode(asked, technique)
    gate = state.gates.of(technique)
    settings = state.settings
    limit = settings.max_divergence if cache.max_divergence is None else cache.max_divergence
    choice = choose_mode(asked, gate, fused_allowed=not settings.no_fused, max_divergence=limit)
    if choice.fallback_reason and cache.fallback == "refuse":
        raise ReuseRefused(_why_refused(choice.fallback_reason, technique.name, state))
    runs = technique if choice.run in ("fused", "fused_if_faster") else make_technique("prefix")
    return Mode(asked, runs, gate.state, choice.fallback_reason, cache.fallback == "refuse" and asked == "fused")


def _asked(state: ServerState, cache: CacheOptions) -> tuple[Asked, Technique]:
    """A technique that is named says what is asked, where nothing else does."""
    settings = state.settings
    if cache.technique is not None:
        technique = make_technique(cache.technique, ratio=cache.recompute_ratio)
        asked: Asked = cache.reuse or technique.reuse  # type: ignore[assignment]
        if technique.reuse != {"auto": "fused"}.get(asked, asked):
            raise ConflictingFields(
                f"Technique '{technique.name}' is {technique.reuse} reuse, but reuse is '{asked}'. Leave one of them out.",
                param="cache.technique",
            )
        return asked, technique
    asked = cache.reuse or settings.reuse  # type: ignore[assignment]
    if asked in _EXACT:
        return asked, make_technique(_EXACT[asked])
    technique = make_technique(settings.technique or DEFAULT_TECHNIQUE, ratio=settings.recompute_ratio)
    return asked, technique if cache.recompute_ratio is None else with_ratio(technique, cache.recompute_ratio)


def _why_refused(reason: str, technique: str, state: ServerState) -> str:
    if reason == "fused_disabled":
        return "fallback=refuse, but this server runs with --no-fused. Start it without, or send fallback=allow."
    return (
        f"fallback=refuse, but the gate of {technique} on '{state.model_name}' is closed, or its estimate is above "
        f"max_divergence. Run: kvweave eval gate {state.settings.model} --technique {technique}"
    )
