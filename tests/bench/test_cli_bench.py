"""``kvweave bench serve``: one JSON line last, files that stand alone, and errors of one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvweave.bench.report import page
from kvweave.bench.run import Options, Result
from kvweave.bench.summary import summarise
from kvweave.bench.target import Target
from kvweave.bench.workloads import Shape
from kvweave.cli import main
from tests.bench.fake import Fake, serving

NOBODY = ("--url", "http://127.0.0.1:9")
SMALL = ("--requests", 4, "--output-tokens", 3, "--document-tokens", 20)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def call(*args: object) -> tuple[int, str, str]:
        code = main(["bench", "serve", *(str(a) for a in args)])
        return code, *capsys.readouterr()

    return call


def test_a_run_prints_tables_and_json_last_and_writes_a_report(
    cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    html, save = tmp_path / "report.html", tmp_path / "rows.jsonl"
    with serving(Fake(kvweave=True).app) as url:
        code, out, err = cli("--url", url, *SMALL, "--html", html, "--save", save)
    assert (code, err) == (0, "")
    summary = json.loads(out.splitlines()[-1])
    assert (summary["requests"], summary["segments"], summary["workload"]) == (4, "parts", "permuted")
    assert summary["ttft_ms"]["p50"] > 0
    assert "time to first token" in out
    assert page_is_complete(html.read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in save.read_text().splitlines()]
    assert [row["output_tokens"] for row in rows] == [3, 3, 3, 3]


def page_is_complete(text: str) -> bool:
    """Three plots that lie within their frames, and nothing that is loaded from elsewhere."""
    plots = [ElementTree.fromstring(plot) for plot in re.findall(r"<svg.*?</svg>", text)]
    for plot in plots:
        width, height = (float(size) for size in plot.attrib["viewBox"].split()[2:])
        for mark in plot:
            assert 0 <= float(mark.attrib.get("cx", mark.attrib.get("x", 0))) <= width
            assert 0 <= float(mark.attrib.get("cy", mark.attrib.get("y", 0))) <= height
    return len(plots) == 3 and not any(word in text for word in ("src=", "<link", "@import", "nan"))


def test_json_alone_on_stdout_if_asked(cli: Callable[..., tuple[int, str, str]]) -> None:
    with serving(Fake().app) as url:
        code, out, _ = cli("--url", url, *SMALL, "--json")
    assert code == 0
    assert json.loads(out)["requests"] == 4
    assert len(out.splitlines()) == 1


def test_texts_are_new_in_every_run_unless_a_seed_is_given(cli: Callable[..., tuple[int, str, str]]) -> None:
    fake = Fake()
    with serving(fake.app) as url:
        for seed in ((), (), ("--seed", 3), ("--seed", 3)):
            cli("--url", url, *SMALL, "--workload", "fresh", "--requests", 1, *seed)
    first, second, third, fourth = (fake.bodies[n]["messages"] for n in (1, 3, 5, 7))
    assert first != second
    assert third == fourth


def test_a_run_without_an_answer_fails(cli: Callable[..., tuple[int, str, str]]) -> None:
    with serving(Fake(fail=2).app) as url:  # the warm-up passes
        code, out, err = cli("--url", url, *SMALL, "--workload", "fresh", "--requests", 1)
    assert code == 1
    assert json.loads(out.splitlines()[-1])["errors"] == {"overloaded": 1}
    assert err == "kvweave: No request was answered (overloaded). Look into the server's log.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workload", "permutd"), "Did you mean 'permuted'"),
        (("--body", "{"), "not JSON"),
        (("--body", "[]"), "no JSON object"),
        (("--segments", "x"), "auto, parts, text"),
        (("--request-rate", "0"), "above 0"),
        (("--requests", "0"), "--requests is 0"),
        (("--html", "/nowhere/x.html"), "can't be written"),
        (("--trace", "x"), "--docs"),
        (("--workload", "fresh", "--docs", __file__), "hold 1"),
    ],
)
def test_wrong_options_are_told_before_anything_is_sent(
    arguments: tuple[str, ...], message: str, cli: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = cli(*NOBODY, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_an_unreachable_server_is_one_line(cli: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = cli(*NOBODY)
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert "No server answers at http://127.0.0.1:9" in err


def test_markup_in_names_stays_text_and_a_run_without_answers_has_a_page() -> None:
    result = Result(Options("x", Shape(1, 1)), Target("http://x", "<script>alert(1)</script>"), summarise([]), ())
    text = page(result)
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "<svg" not in text
