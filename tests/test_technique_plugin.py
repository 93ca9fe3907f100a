"""The example of CONTRIBUTING.md is found by name once it is installed, and does what it says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvweave.errors import InvalidOption, UnknownTechnique
from kvweave.reuse.registry import make_technique, techniques
from tests.lab import Lab, close, standard

SOURCE = Path(__file__).parents[1] / "examples" / "technique_plugin"
FAMILIES = ("llama", "gemma2", "smollm3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as pip installs it, in a folder of its own; builds leave files behind, so a copy is built."""
    base = tmp_path_factory.mktemp("plugin")
    project = shutil.copytree(SOURCE, base / "project", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    offline = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation"]
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", str(base / "installed"), str(project)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return base / "installed"


@pytest.fixture
def installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On the path for one test; entry points are looked up on the path."""
    monkeypatch.syspath_prepend(folder)
    yield
    sys.modules.pop("kvweave_edges", None)


@pytest.mark.skipif("edges" in techniques(), reason="the example is installed here")
def test_unknown_before_it_is_installed() -> None:
    with pytest.raises(UnknownTechnique):
        make_technique("edges")


@pytest.mark.usefixtures("installed")
def test_found_by_name_with_its_options() -> None:
    technique = make_technique("edges:k=3")
    assert techniques()["edges"] is type(technique)
    assert (technique.name, technique.reuse, technique.k) == ("edges", "fused", 3)
    with pytest.raises(InvalidOption):
        make_technique("edges:k=-1")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("installed")
def test_all_recomputed_is_the_full_prefill(family: str) -> None:
    lab = Lab(family)
    documents, prompt = standard()
    lab.precompute(*documents)
    result = lab.run(prompt, "edges:k=16", keep=4)  # the longest chunk has 32 tokens
    assert (result.report.ran, result.report.fused_tokens) == ("fused", 0)
    assert close(result.logits, lab.native(prompt)[-4:])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("installed")
def test_fewer_recomputed_is_not(family: str) -> None:
    """Negative control: the equality above isn't vacuous, and the option is heard."""
    documents, prompt = standard()
    logits = {}
    for k in (0, 4):
        lab = Lab(family)
        lab.precompute(*documents)
        result = lab.run(prompt, f"edges:k={k}")
        assert result.report.recomputed_tokens == 4 * 2 * k  # four chunks, two sides
        assert (result.logits - lab.native(prompt)[-1:]).abs().max() > 1e-2
        logits[k] = result.logits
    assert (logits[0] - logits[4]).abs().max() > 1e-3
    naive = Lab(family)
    naive.precompute(*documents)
    assert close(logits[0], naive.run(prompt, "naive").logits)
