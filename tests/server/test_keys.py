"""API keys: the file, who is who, and how much at a time."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import yaml

from kvweave.errors import ConfigError, InvalidApiKey, MissingApiKey, RateLimited, ScopeMissing
from kvweave.server.keys import Caller, KeyRing, digest_of, read_keys

ENTRY = {"name": "k1", "sha256": hashlib.sha256(b"one").hexdigest(), "tenant": "acme", "scopes": ["infer"]}


def write(tmp_path: Path, *entries: object) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump(list(entries)))
    return path


def test_a_key_is_known_by_its_digest(tmp_path: Path) -> None:
    ring = KeyRing(read_keys(write(tmp_path, ENTRY, {**ENTRY, "name": "k2", "sha256": "00" * 32})))
    assert ring.identify("Bearer one") == Caller("k1", "acme", frozenset(("infer",)))
    assert ring.identify("bearer  one ").name == "k1"
    assert not ring.open
    for missing in (None, "", "one", "Basic one", "Bearer "):
        with pytest.raises(MissingApiKey):
            ring.identify(missing)
    for wrong in ("Bearer two", "Bearer \udcff"):
        with pytest.raises(InvalidApiKey):
            ring.identify(wrong)


def test_scopes_are_separate() -> None:
    caller = Caller("k", "t", frozenset(("infer",)))
    caller.require("infer")
    with pytest.raises(ScopeMissing, match="'admin'"):
        caller.require("admin")


def test_a_key_runs_as_many_as_it_may() -> None:
    limited, other = (Caller(name, "t", frozenset(("infer",)), 1) for name in ("a", "b"))
    ring = KeyRing({digest_of("x"): limited})
    with ring.running(limited), ring.running(other), pytest.raises(RateLimited) as error, ring.running(limited):
        pass
    assert error.value.retry_after
    with ring.running(limited):
        pass  # there is room again


def test_new_keys_replace_the_old_ones(tmp_path: Path) -> None:
    ring = KeyRing(read_keys(write(tmp_path, ENTRY)))
    ring.replace({digest_of("new"): Caller("n", "acme", frozenset(("infer",)))})
    assert ring.identify("Bearer new").name == "n"
    with pytest.raises(InvalidApiKey):
        ring.identify("Bearer one")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sha256": "abc"}, "64 hexadecimal"),
        ({"scopes": ["infre"]}, "Did you mean 'infer'"),
        ({"scopes": []}, "scopes"),
        ({"tenant": ""}, "tenant"),
        ({"name": None}, "name"),
        ({"limit": {}}, "Did you mean 'limits'"),
        ({"limits": {"max_concurrent": 0}}, "1 or more"),
        ({"limits": {"rpm": 1}}, "unknown"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_keys(write(tmp_path, {**ENTRY, **change}))


def test_a_key_stands_in_one_entry(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="twice"):
        read_keys(write(tmp_path, ENTRY, {**ENTRY, "name": "k2"}))
    with pytest.raises(ConfigError, match="can't be read"):
        read_keys(tmp_path / "none.yaml")
