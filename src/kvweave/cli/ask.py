"""``kvweave ask``: one answer over documents, with the accounting of its prompt."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvweave.cli.output import LOG, Progress, apart, print_json
from kvweave.cli.prompting import check_fits, make_prompt, to_documents
from kvweave.cli.units import show_bytes
from kvweave.cli.writing import close
from kvweave.config import EngineConfig
from kvweave.core.prompt import Document, Prompt, TokenPrompt
from kvweave.core.report import Output
from kvweave.core.sampling import SamplingParams
from kvweave.documents import DocumentFile, read_documents
from kvweave.errors import ConfigError, UnknownTechnique

if TYPE_CHECKING:
    from kvweave.llm import LLM
    from kvweave.reuse.base import Technique

TECHNIQUES = ("cacheblend", "epic", "full", "naive", "prefix", "question", "random", "raw")
"""The built-in names, for an answer before torch is loaded; a test holds them equal to the registry's."""


@dataclass(frozen=True)
class AskJob:
    """What is asked, checked as far as it can be without loading torch."""

    question: str
    files: tuple[DocumentFile, ...]
    sampling: SamplingParams
    engine: EngineConfig
    model: str
    technique: str | None
    ratio: float | None
    reuse: str | None

    @classmethod
    def of(
        cls,
        *,
        docs: Sequence[str],
        words: Sequence[str],
        sampling: dict[str, Any],
        engine: dict[str, Any],
        technique: str | None,
        **rest: Any,
    ) -> AskJob:
        *more, question = words
        _check_question(question)
        _check_technique(technique)
        params, config = SamplingParams(**sampling), EngineConfig.of(**engine)
        files = tuple(read_documents([*docs, *more]))
        return cls(question=question, files=files, sampling=params, engine=config, technique=technique, **rest)


def _check_question(question: str) -> None:
    if not question.strip():
        raise ConfigError("The question is empty. Put it last: kvweave ask --docs FILES... QUESTION")
    if os.path.exists(question):
        raise ConfigError(
            f"There is no question: the last word, '{question}', is a file. Put the question behind the files."
        )
    try:
        question.encode()
    except UnicodeEncodeError:
        raise ConfigError("The question is not valid UTF-8. Check the encoding of the terminal or script.") from None


def _check_technique(technique: str | None) -> None:
    installed = (entry.name for entry in importlib.metadata.entry_points(group="kvweave.techniques"))
    known = {*TECHNIQUES, *installed}
    if technique is not None and (name := technique.partition(":")[0]) not in known:
        raise UnknownTechnique(name, known)


@dataclass(frozen=True)
class Prefilled:
    """The documents that were computed beforehand: how many tokens, and how long that took."""

    tokens: int
    ms: float


@dataclass(frozen=True)
class Comparison:
    """The same prompt by full prefill. ``kl`` is KL(full || technique) of the first answer token, in nats."""

    output: Output
    kl: float
    same_text: bool


def run(job: AskJob, *, compare: bool, as_json: bool, quiet: bool) -> None:
    """Load, prefill the documents, answer, compare, show."""
    progress = Progress(quiet)
    with apart(as_json):
        llm, technique = _load(job, progress)
    try:
        _run(job, llm, technique, progress, compare=compare, as_json=as_json, quiet=quiet)
    finally:
        close(llm, progress)


def _run(
    job: AskJob, llm: LLM, technique: Technique, progress: Progress, *, compare: bool, as_json: bool, quiet: bool
) -> None:
    with apart(as_json):
        prompt = make_prompt(llm, to_documents(job.files), job.question)
        tokens = check_fits(llm, prompt, job.sampling.max_tokens)
        prefilled = _prefill(llm, prompt, progress) if technique.reuse == "fused" else None
        sampling = job.sampling
        if compare and sampling.temperature and sampling.seed is None:  # both answers must draw the same numbers
            sampling = dataclasses.replace(sampling, seed=secrets.randbits(31))
        output = _answer(llm, prompt, sampling, show=not as_json)
        comparison = _compare(llm, prompt, sampling, output, progress) if compare else None
    if as_json:
        print_json(_document(job, llm, tokens, prefilled, output, comparison))
        return
    if not quiet:
        print(f"\n{_accounting(output, prefilled, len(job.files))}")
    if comparison is not None:
        print(f"\n{_verdict(output, comparison)}")


def _load(job: AskJob, progress: Progress) -> tuple[LLM, Technique]:
    with progress.status(f"Loading {job.model}") as report:
        from kvweave.llm import LLM
        from kvweave.reuse.registry import DEFAULT_TECHNIQUE, make_technique

        name = job.technique or {"off": "full", "exact": "prefix"}.get(job.reuse or "fused", DEFAULT_TECHNIQUE)
        technique = make_technique(name, ratio=job.ratio)
        options = {f.name: getattr(job.engine, f.name) for f in dataclasses.fields(job.engine)}
        return LLM(job.model, reuse=job.reuse, technique=technique, progress=report, **options), technique


def _prefill(llm: LLM, prompt: Prompt, progress: Progress) -> Prefilled:
    """Compute the documents beforehand, as a server would have done long ago."""
    start = time.perf_counter()
    first = next(i for i, segment in enumerate(prompt.segments) if isinstance(segment, Document))
    with progress.bar("Prefilling documents", total=len(prompt.documents)) as step:
        done = llm.precompute(
            prompt.documents,
            head=dataclasses.replace(prompt, segments=prompt.segments[: first + 1]),
            progress=lambda item: step(f"Document {item.id}: {item.computed_tokens:,} tokens computed"),
        )
    return Prefilled(sum(item.computed_tokens for item in done), (time.perf_counter() - start) * 1e3)


def _answer(llm: LLM, prompt: Prompt, sampling: SamplingParams, *, show: bool) -> Output:
    """Stream the answer to stdout; if it is cut short, what is on the line already is ended too."""
    shown = False
    try:
        for delta in llm.stream(prompt, sampling):
            if show:
                print(delta.text, end="", flush=True)
                shown |= bool(delta.text) or delta.output is not None
            if delta.output is not None:
                return delta.output
    finally:
        if shown:
            print(flush=True)
    raise AssertionError("a stream ends with its output")


def _compare(llm: LLM, prompt: Prompt, sampling: SamplingParams, output: Output, progress: Progress) -> Comparison:
    from kvweave.evaluation.metrics import kl_divergence

    with progress.status("Full prefill, for comparison") as report:
        full = llm.generate(prompt, sampling, technique="full")
        report("First-token distributions, for comparison")
        first = (*full.token_ids, *output.token_ids, 0)[:1]  # row 0 doesn't depend on it
        reference = llm.score(prompt, first, technique="full").logits[:1]
        judged = llm.score(prompt, first).logits[:1]
    LOG.info("Compared with a full prefill: %s", full.reuse)
    return Comparison(full, float(kl_divergence(reference, judged)[0]), full.text == output.text)


def _accounting(output: Output, prefilled: Prefilled | None, documents: int) -> str:
    times = output.reuse.timings
    line = f"{output.reuse}\n{output.reuse.technique}: first token after {times['ttft_ms']:,.0f} ms"
    if prefilled is not None and prefilled.tokens:
        line += f"; {documents} documents had been prefilled in {prefilled.ms / 1e3:.1f} s"
    elif prefilled is not None:
        line += f"; {documents} documents were there already"
    return "\n".join([line, *_loads(output)])


def _loads(output: Output) -> list[str]:
    """What came from slower tiers than host memory, and what the controller made of that."""
    report, lines = output.reuse, []
    slow = {tier: load for tier, load in report.loads.items() if tier != "host"}
    for tier, load in slow.items():
        what = f"{load.chunks} chunks of {load.tokens:,} tokens, {show_bytes(load.bytes)}"
        lines.append(f"loaded from {tier}: {what} in {load.load_ms:,.0f} ms of I/O")
    if slow:
        lines[-1] += f"; waited for {report.timings['load_wait_ms']:,.0f} ms"
    if (made := report.controller) is not None:
        lines.append(
            f"controller '{made.policy}': {made.run}, ratio {made.ratio:.2f} (asked for {made.r_min:.2f}); expected first "
            f"token after {made.predicted_ttft_ms:,.0f} ms, by full prefill {made.predicted_full_ms:,.0f} ms"
        )
    return lines


def _verdict(output: Output, comparison: Comparison) -> str:
    full, name = comparison.output.reuse.timings["ttft_ms"], output.reuse.technique
    lines = [
        f"full: first token after {full:,.0f} ms ({full / output.reuse.timings['ttft_ms']:.1f} times {name}'s); "
        f"first-token KL(full || {name}) {comparison.kl:.2g} nats; {'same text' if comparison.same_text else 'other text:'}"
    ]
    return "\n".join(lines if comparison.same_text else [*lines, comparison.output.text])


def _document(
    job: AskJob, llm: LLM, tokens: TokenPrompt, prefilled: Prefilled | None, output: Output, comparison: Comparison | None
) -> dict[str, Any]:
    documents = [(span.document.id, len(span.token_ids)) for span in tokens.spans if span.document is not None]
    return {
        "model": llm.name,
        "question": job.question,
        "answer": output.text,
        "finish_reason": output.finish_reason,
        "documents": [
            {"id": label, "path": os.fspath(file.path), "tokens": size}
            for (label, size), file in zip(documents, job.files, strict=True)
        ],
        "prefilled": prefilled and dataclasses.asdict(prefilled),
        "reuse": output.reuse.to_json(),
        "compare": comparison
        and {
            "answer": comparison.output.text,
            "same_text": comparison.same_text,
            "first_token_kl": comparison.kl if math.isfinite(comparison.kl) else None,
            "reuse": comparison.output.reuse.to_json(),
        },
    }
