"""``kvweave precompute``: documents into the tiers, ahead of the questions."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvweave.cli.output import Progress, apart, complain, print_json, print_table
from kvweave.cli.prompting import to_documents
from kvweave.cli.units import show_bytes, show_count
from kvweave.cli.writing import TierWrites, close, show_reasons
from kvweave.config import EngineConfig, Tiers
from kvweave.core.prompt import Document
from kvweave.documents import DocumentFile, read_documents
from kvweave.errors import InvalidOption, RequestError, suggest

if TYPE_CHECKING:
    from kvweave.llm import LLM

TARGETS = ("disk", "remote", "host")
State = Literal["computed", "already_there", "too_short", "failed", "not_reached"]


@dataclass(frozen=True)
class PrecomputeJob:
    """What is computed and where it goes, checked as far as it can be without loading torch."""

    files: tuple[DocumentFile, ...]
    engine: EngineConfig
    model: str

    @classmethod
    def of(
        cls, *, files: Sequence[str], to: Sequence[str], tiers: Tiers, engine: dict[str, Any], model: str
    ) -> PrecomputeJob:
        chosen = _only(to, tiers)
        # Nothing is fused here, so there is nothing for a controller to decide, or to measure beforehand.
        config = EngineConfig.of(**engine, tiers=chosen, controller="off")
        return cls(tuple(read_documents(files)), config, model)


def _only(to: Sequence[str], tiers: Tiers) -> Tiers:
    """The tiers that ``--to`` names, or all that are configured; ``host`` alone computes and forgets."""
    for name in to:
        if name not in TARGETS:
            raise InvalidOption(f"--to {name}: there is no such tier. {suggest(name, TARGETS)}")
    if not to and tiers.disk is None and not tiers.remotes:
        raise InvalidOption("There is no tier to write to. Give --disk-tier DIR or --remote-tier URL.")
    if "disk" in to and tiers.disk is None:
        raise InvalidOption("--to disk: there is no disk tier. Give --disk-tier DIR.")
    if "remote" in to and not tiers.remotes:
        raise InvalidOption("--to remote: there is no remote tier. Give --remote-tier URL.")
    if not to:
        return tiers
    return dataclasses.replace(
        tiers, disk=tiers.disk if "disk" in to else None, remote=tiers.remotes if "remote" in to else ()
    )


@dataclass(frozen=True)
class Done:
    """What became of one document. ``tokens``: those that are kept, or were computed now."""

    state: State
    tokens: int = 0
    error: str | None = None


def run(job: PrecomputeJob, *, as_json: bool, quiet: bool) -> int:
    """Compute, write, tell; returns the exit code. Interrupted, it still writes what was computed."""
    start = time.perf_counter()
    progress = Progress(quiet)
    with apart(as_json):
        llm = _load(job, progress)
        done: list[Done] = []
        interrupted = False
        try:
            _compute(llm, to_documents(job.files), done, progress)
        except KeyboardInterrupt:
            interrupted = True
            complain("Interrupted: writing what was computed. Press Ctrl-C again to stop at once.")
        finally:
            writes = close(llm, progress)
    done += [Done("not_reached")] * (len(job.files) - len(done))
    report = _report(job, done, writes, interrupted, time.perf_counter() - start)
    if as_json:
        print_json(report)
    elif not quiet:
        _print(report)
    if interrupted:
        count = sum(one.state == "not_reached" for one in done)
        complain(f"Interrupted: {count} of {len(done)} documents are left. The store is fine; run the same again to go on.")
    return 0 if report["complete"] else 1


def _load(job: PrecomputeJob, progress: Progress) -> LLM:
    with progress.status(f"Loading {job.model}") as report:
        from kvweave.llm import LLM

        options = {f.name: getattr(job.engine, f.name) for f in dataclasses.fields(job.engine)}
        return LLM(job.model, progress=report, **options)


def _compute(llm: LLM, documents: Sequence[Document], done: list[Done], progress: Progress) -> None:
    """One by one, so that a document that can't be computed doesn't keep the others from it."""
    with progress.bar("Computing documents", total=len(documents)) as step:
        for document in documents:
            try:
                (item,) = llm.precompute([document])
            except RequestError as error:
                done.append(Done("failed", error=str(error)))
            else:
                state: State = "computed" if item.computed_tokens else "already_there" if item.chunk_tokens else "too_short"
                done.append(Done(state, item.computed_tokens or item.chunk_tokens))
            step(f"Document {document.id}: {done[-1].state}, {done[-1].tokens:,} tokens")


def _report(
    job: PrecomputeJob, done: Sequence[Done], writes: dict[str, TierWrites], interrupted: bool, seconds: float
) -> dict[str, Any]:
    counts = Counter(one.state for one in done)
    lost = any(tier.failed for tier in writes.values())
    return {
        "model": job.model,
        "tenant": job.engine.tenant,
        "anchor": job.engine.anchor,
        **{state: counts[state] for state in ("computed", "already_there", "too_short", "failed", "not_reached")},
        "computed_tokens": sum(one.tokens for one in done if one.state == "computed"),
        "seconds": round(seconds, 3),
        "tiers": {name: dataclasses.asdict(tier) for name, tier in writes.items()},
        "interrupted": interrupted,
        "complete": not (interrupted or lost or counts["failed"] or counts["not_reached"]),
        "documents": [
            {"id": document.id, "path": os.fspath(file.path), **dataclasses.asdict(one)}
            for document, file, one in zip(to_documents(job.files), job.files, done, strict=True)
        ],
    }


def _print(report: dict[str, Any]) -> None:
    counts = f"{report['computed']} computed ({report['computed_tokens']:,} tokens), {report['already_there']} already there"
    if report["too_short"]:
        counts += f", {report['too_short']} too short to be kept"
    print(f"{counts}, {report['failed']} failed; {report['seconds']:.1f} s")
    for name, tier in report["tiers"].items():
        failed = f", {show_reasons(tier['failed'])}" if tier["failed"] else ""
        print(f"tier {name}: {show_count(tier['written'], 'record')} written, {show_bytes(tier['bytes'])}{failed}")
    failures = [(item["id"], item["error"]) for item in report["documents"] if item["error"]]
    if failures:
        print_table("Failed", ("document", "why"), failures)
