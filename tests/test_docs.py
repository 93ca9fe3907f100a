"""The documents speak of things that exist: Python compiles, names are there, links lead somewhere."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from kvweave.cli.app import app
from kvweave.models.support import REFUSED, SUPPORTED
from kvweave.reuse.registry import techniques

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
OURS = ("kvweave", "tests", "benchmarks")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """(where, text) of every fenced block of a language."""
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            if match[1] == language:
                yield f"{page.name}:{text.count(chr(10), 0, match.start()) + 1}", match[2]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def headings(page: Path) -> set[str]:
    """The fragments of a page's headings, as code hosts make them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def missing_names(code: str) -> list[str]:
    """What a piece of Python imports from this repository that isn't there."""
    missing = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
            module = importlib.import_module(node.module)
            missing += [f"{node.module}.{a.name}" for a in node.names if not hasattr(module, a.name)]
    return missing


@pytest.mark.parametrize(("where", "code"), [pytest.param(*b, id=b[0]) for b in blocks("python")])
def test_python_compiles_and_its_names_exist(where: str, code: str) -> None:
    compile(code, where, "exec")
    assert missing_names(code) == []


def test_a_missing_name_is_found() -> None:
    assert missing_names("from kvweave import LLM, Fusion") == ["kvweave.Fusion"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not fragment or fragment in headings(target), link


def test_headings_that_docstrings_name_exist() -> None:
    named = [
        (path, page, title)
        for path in (ROOT / "src").rglob("*.py")
        for page, title in re.findall(r'(docs/[\w/-]+\.md), "([^"]+)"', path.read_text())
    ]
    assert named
    for path, page, title in named:
        assert title.lower().replace(" ", "-") in headings(ROOT / page), f"{path} names {page}, {title!r}"


def test_commands_and_their_options_exist() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines = [line.partition("#")[0].split() for _, text in blocks("sh") for line in text.splitlines()]
    ours = [words for words in lines if words[:1] == ["kvweave"]]
    assert ours
    for _, name, *rest in ours:
        command = commands[name]
        if hasattr(command, "commands"):  # kvweave cache ...
            name, *rest = rest
            command = command.commands[name]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in rest if word.startswith("-")} <= options, name


def test_make_targets_exist() -> None:
    shown = [text for _, text in blocks("sh")] + [code for page in PAGES for code in re.findall(r"`([^`]+)`", prose(page))]
    named = {name for text in shown for name in re.findall(r"^make (\w+)", text, re.MULTILINE)}
    assert {"demo", "test"} <= named
    assert named <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_modules_that_are_run_exist() -> None:
    named = {name for page in PAGES for name in re.findall(r"python -m (benchmarks[\w.]*)", page.read_text())}
    assert named
    for name in named:
        assert (ROOT / name.replace(".", "/") / "__main__.py").is_file(), name


@pytest.mark.parametrize("name", [n for n, cls in techniques().items() if cls.__module__.startswith("kvweave.")])
def test_every_technique_is_described_with_its_defaults(name: str) -> None:
    assert f"| `{name}` |" in (ROOT / "README.md").read_text()
    text = (ROOT / "docs" / "techniques.md").read_text()
    section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    assert section
    described = set(re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|", section, re.MULTILINE))
    assert described == {(f.name, str(f.default)) for f in dataclasses.fields(techniques()[name])}


def test_every_model_family_is_listed() -> None:
    text = (ROOT / "README.md").read_text().partition("\n## Models\n")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in text.splitlines() if line.startswith(("| run", "| refused"))]
    run, *refused = [set(re.findall(r"\w+", row[2])) for row in rows]
    assert run == set(SUPPORTED)
    assert set().union(*refused) >= set(REFUSED)


def test_the_example_of_contributing_is_the_one_that_is_tested() -> None:
    example = (ROOT / "examples" / "technique_plugin" / "kvweave_edges.py").read_text()
    (shown,) = [code for where, code in blocks("python") if where.startswith("CONTRIBUTING") and "class Edges" in code]
    assert shown in example
