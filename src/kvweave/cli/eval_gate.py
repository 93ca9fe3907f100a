"""``kvweave eval gate``: measure, tell, keep the verdict; ``kvweave eval show``: the verdicts that are kept."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kvweave.cli.output import Progress, apart, print_json, print_table
from kvweave.config import EngineConfig, Tiers
from kvweave.errors import InvalidOption
from kvweave.evaluation.datasets import Example, load_dataset
from kvweave.evaluation.gate_data import gate_examples

if TYPE_CHECKING:
    from kvweave.evaluation.gate import PromptDivergence
    from kvweave.llm import LLM
    from kvweave.reuse.base import Technique
    from kvweave.reuse.gate import GateRecord

CLOSED = 3  # exit code: a check ran and the answer is no
_BUILT_IN = "built-in"


@dataclass(frozen=True)
class GateJob:
    """What is measured, checked as far as it can be without loading torch."""

    examples: tuple[Example, ...]
    data: str
    engine: EngineConfig
    model: str
    technique: str | None
    ratio: float | None
    limit: float
    dry_run: bool

    @classmethod
    def of(
        cls, *, data: Path | None, records: int | None, engine: dict[str, Any], codec: str, limit: float, **rest: Any
    ) -> GateJob:
        if not 0 <= limit < math.inf:
            raise InvalidOption(f"--limit {limit} is out of range. Use nats, from 0 up.")
        # One tier, whose loads take no time that a controller could weigh.
        config = EngineConfig.of(**engine, tiers=Tiers(codec=codec), controller="off")
        examples = gate_examples() if data is None else load_dataset(data)
        name = _BUILT_IN if data is None else data.name
        return cls(examples=tuple(examples[:records]), data=name, engine=config, limit=limit, **rest)


def run(job: GateJob, *, as_json: bool, quiet: bool) -> int:
    """Print the report and, as the last line, its summary as JSON; returns the exit code."""
    progress = Progress(quiet)
    with apart(as_json):
        from kvweave.evaluation.gate import digest, measure, verdict
        from kvweave.reuse.gate import GateStore
        from kvweave.reuse.registry import DEFAULT_TECHNIQUE, make_technique

        technique = make_technique(job.technique or DEFAULT_TECHNIQUE, ratio=job.ratio)
        with _load(job, technique, progress) as llm:
            with progress.bar("Comparing with full prefill", total=len(job.examples)) as step:
                results = measure(llm, technique, job.examples, progress=step)
            record = verdict(llm, technique, results, limit=job.limit, data=f"{job.data}:{digest(job.examples)}")
        path = None if job.dry_run else GateStore(_home(job.engine.home)).write(record)
    summary = _summary(record, results, path)
    if as_json:
        print_json(summary | {"prompts": [_prompt(result) for result in results]})
    else:
        _print(record, results, path)
        print(json.dumps(summary, allow_nan=False))
    return 0 if record.passed else CLOSED


def _load(job: GateJob, technique: Technique, progress: Progress) -> LLM:
    with progress.status(f"Loading {job.model}") as report:
        from kvweave.llm import LLM

        options = {f.name: getattr(job.engine, f.name) for f in dataclasses.fields(job.engine)}
        return LLM(job.model, technique=technique, progress=report, **options)


def _home(home: Path | None) -> Path:
    from kvweave.models.sources import default_home

    return home or default_home()


def show(home: Path | None, *, as_json: bool) -> None:
    from kvweave.reuse.gate import GateStore

    records = list(GateStore(_home(home)).records())
    if as_json:
        print_json({"gates": [_verdict(record) for record in records]})
        return
    rows = [
        (r.model, r.fingerprint[:12], _spec(r), _nats(r.upper), _nats(r.limit), _state(r), r.measured_at) for r in records
    ]
    print_table("Gates", ("model", "fingerprint", "technique", "upper 95 %", "limit", "gate", "measured"), rows)


# --- what is shown ----------------------------------------------------------------------------------------------------


def _verdict(record: GateRecord) -> dict[str, Any]:
    """A record as JSON; infinite divergences, which JSON lacks, are null."""
    data = {name: value for name, value in dataclasses.asdict(record).items() if value != math.inf}
    missing = {f.name: None for f in dataclasses.fields(record) if f.name not in data}
    return {"gate": _state(record), **data, **missing}


def _summary(record: GateRecord, results: Sequence[PromptDivergence], path: Path | None) -> dict[str, Any]:
    references = {}
    for name in results[0].references:
        others = [result.references[name] for result in results]
        references[name] = {"mean": _finite(kl.answer for kl in others), "first_mean": _finite(kl.first for kl in others)}
    budget = fmean(result.reuse.budget for result in results)
    written = None if path is None else os.fspath(path)
    return {**_verdict(record), "budget": budget, "references": references, "record": written}


def _finite(values: Iterable[float]) -> float | None:
    mean = fmean(values)
    return mean if math.isfinite(mean) else None


def _prompt(result: PromptDivergence) -> dict[str, Any]:
    return {
        "id": result.id,
        "answer_tokens": result.answer_tokens,
        "reuse": result.reuse.to_json(),
        "first": _finite([result.divergence.first]),
        "answer": _finite([result.divergence.answer]),
        "references": {
            name: {"first": _finite([kl.first]), "answer": _finite([kl.answer])} for name, kl in result.references.items()
        },
    }


def _print(record: GateRecord, results: Sequence[PromptDivergence], path: Path | None) -> None:
    rows = []
    for result in results:
        counts = (
            result.reuse.prompt_tokens,
            result.reuse.fused_tokens,
            result.reuse.recomputed_tokens,
            result.answer_tokens,
        )
        divergence = result.divergence
        rows.append((result.id, *(f"{count:,}" for count in counts), _nats(divergence.first), _nats(divergence.answer)))
    columns = ("prompt", "tokens", "fused", "recomputed", "answer tokens", "KL first", "KL answer")
    print_table(f"{record.technique} against full prefill, nats", columns, rows)
    bounds = [(_spec(record), *map(_nats, (record.first_mean, record.first_upper, record.mean, record.upper)))]
    for name in results[0].references:
        others = [result.references[name] for result in results]
        bounds.append((name, _nats(fmean(kl.first for kl in others)), "", _nats(fmean(kl.answer for kl in others)), ""))
    print_table(f"Over {len(results)} prompts", ("", "first, mean", "upper 95 %", "answer, mean", "upper 95 %"), bounds)
    sign = "<=" if record.passed else ">"
    kept = "nothing was written" if path is None else f"written to {path}"
    print(f"The gate is {_state(record)}: {_nats(record.upper)} {sign} {_nats(record.limit)} nats; {kept}")


def _state(record: GateRecord) -> str:
    return "open" if record.passed else "closed"


def _spec(record: GateRecord) -> str:
    options = ",".join(f"{name}={value}" for name, value in record.options.items() if value is not None)
    return f"{record.technique}:{options}" if options else record.technique


def _nats(value: float) -> str:
    return f"{value:.4f}"
