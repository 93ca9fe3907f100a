"""Techniques by name and option."""

from __future__ import annotations

import pytest

from kvweave.errors import InvalidOption, UnknownOption, UnknownTechnique
from kvweave.reuse.base import Technique
from kvweave.reuse.cacheblend import CacheBlend
from kvweave.reuse.epic import Epic
from kvweave.reuse.registry import DEFAULT_TECHNIQUE, make_technique, techniques


def test_all_names_make_a_technique() -> None:
    names = {"full", "prefix", "naive", "raw", "epic", "random", "cacheblend", "question"}
    assert names <= set(techniques())
    assert DEFAULT_TECHNIQUE in names
    for name in names:
        made = make_technique(name)
        assert isinstance(made, Technique)
        assert made.name == name


def test_options_in_the_name_are_parsed_by_type() -> None:
    assert make_technique("epic:k=32") == Epic(k=32)
    made = make_technique("cacheblend:schedule=gradual,head=0,check_layer=3", ratio=0.3)
    assert made == CacheBlend(ratio=0.3, schedule="gradual", head=0, check_layer=3)
    assert make_technique(Epic(k=2)) == Epic(k=2)


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("cachblend", UnknownTechnique, "Did you mean 'cacheblend'"),
        ("cacheblend:rato=0.1", UnknownOption, "Did you mean 'ratio'"),
        ("epic:k", InvalidOption, "has no value"),
        ("epic:k=many", InvalidOption, "not a number"),
        ("cacheblend:schedule=gradul", InvalidOption, "Did you mean 'gradual'"),
        ("cacheblend:deviation=q", InvalidOption, "deviation 'q'"),
        ("cacheblend:ratio=1.5", InvalidOption, "between 0 and 1"),
        ("random:ratio=-0.1", InvalidOption, "between 0 and 1"),
        ("epic:k=-1", InvalidOption, "0 or more"),
        ("naive:ratio=0.1", UnknownOption, "technique 'naive'"),
    ],
)
def test_bad_specs_say_what_to_do(spec: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        make_technique(spec)
    assert "\n" not in str(caught.value)


def test_ratio_for_a_technique_without_one_is_refused() -> None:
    with pytest.raises(UnknownOption, match="ratio"):
        make_technique("full", ratio=0.1)
    with pytest.raises(InvalidOption, match="not both"):
        make_technique(Epic(), ratio=0.1)
