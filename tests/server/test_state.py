"""What a server's state does by itself."""

from __future__ import annotations

import pytest

from kvweave.server import state
from kvweave.server.state import Ignored


def test_a_field_without_effect_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(state.LOG, "info", lambda text, names: told.append(names))
    ignored = Ignored()
    ignored.tell(["b", "a", "a"])
    ignored.tell(["a"])
    ignored.tell(["c"])
    assert told == ["a, b", "c"]
    told.clear()
    for i in range(2000):
        ignored.tell([f"name-{i}"])
    assert len(told) < 1001  # callers choose the names
