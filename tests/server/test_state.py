"""What a server's state does by itself."""

from __future__ import annotations

import logging

import pytest

from kvweave.server.state import Ignored


def test_a_field_without_effect_is_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("kvweave"), "propagate", True)  # the command line's tests may have changed it
    caplog.set_level(logging.INFO, logger="kvweave.server")
    ignored = Ignored()
    ignored.tell(["b", "a", "a"])
    ignored.tell(["a"])
    ignored.tell(["c"])
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == ["a, b", "c"]
    caplog.clear()
    for i in range(2000):
        ignored.tell([f"name-{i}"])
    assert len(caplog.records) < 1001  # callers choose the names
