"""Settings of a server: where they come from, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.errors import ConfigError, InvalidOption, UnknownOption
from kvweave.server.settings import FIELDS, ServerSettings, check_environment, environment_names, parse_seconds, resolve


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    return path


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(tmp_path: Path) -> None:
    file = write(tmp_path, "port: 1\nmax_queue: 1\nkv_pool: 1GiB\n")
    found = resolve({"port": 3}, {"KVWEAVE_PORT": "2", "KVWEAVE_MAX_QUEUE": "2"}, file)
    assert (found.settings.port, found.settings.max_queue, found.settings.kv_pool) == (3, 2, "1GiB")
    origins = {name: found.origins[name] for name in ("port", "max_queue", "kv_pool", "host")}
    assert origins == {"port": "flag", "max_queue": "environment", "kv_pool": "file", "host": "default"}


def test_the_environment_names_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "port: 1\n")
    assert resolve({}, {"KVWEAVE_CONFIG": str(file)}).settings.port == 1


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("prot: 1", UnknownOption, "Did you mean 'port'"),
        ("port: many", InvalidOption, "port='many'"),
        ("port: 70000", InvalidOption, "65535"),
        ("reuse: fussed", InvalidOption, "Did you mean 'fused'"),
        ("strict_fields: maybe", InvalidOption, "true or false"),
        ("port: [1]", InvalidOption, "expected one value"),
        ("drain_timeout: soon", InvalidOption, "not a time"),
        ("- port", ConfigError, "mapping"),
        ("port: 1: 2", ConfigError, "can't be read"),
    ],
)
def test_what_a_file_says_wrong_is_named(tmp_path: Path, text: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        resolve({}, {}, write(tmp_path, text))


def test_a_misspelt_variable_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'KVWEAVE_PORT'"):
        check_environment({"KVWEAVE_PROT": "1"})
    check_environment(dict.fromkeys(environment_names(), "1") | {"PATH": "/bin"})


def test_another_address_needs_a_key_or_a_word() -> None:
    with pytest.raises(InvalidOption, match="--insecure"):
        ServerSettings(host="0.0.0.0")
    for allowed in ({"insecure": True}, {"api_key": "k"}, {"api_key_file": Path("keys")}):
        assert not ServerSettings(host="0.0.0.0", **allowed).loopback  # type: ignore[arg-type]


def test_secrets_are_hidden() -> None:
    environ = {"KVWEAVE_API_KEY": "sk-secret", "KVWEAVE_REMOTE_TIER": "redis://u:hunter2@host/0 s3://bucket/p"}
    shown = {name: value for name, value, _ in resolve({}, environ).rows()}
    assert shown["api_key"] == "***"
    assert shown["remote_tier"] == "redis://***@host/0 s3://bucket/p"
    assert not any("secret" in value or "hunter2" in value for value in shown.values() if value)
    assert shown.keys() == FIELDS.keys()


def test_a_share_of_the_memory_becomes_bytes() -> None:
    options = ServerSettings(host_tier="10%").engine_options(None, 1000)
    assert options["chunk_cache"] == 100
    assert ServerSettings(host_tier="1KiB").engine_options(None, 1000)["chunk_cache"] == 1024


@given(st.integers(0, 10**6), st.sampled_from([("", 1.0), ("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0)]))
def test_times_have_units(number: int, unit: tuple[str, float]) -> None:
    assert parse_seconds(f"{number}{unit[0]}", "x") == pytest.approx(number * unit[1])
