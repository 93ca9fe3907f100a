"""Answer questions over documents twice, by full prefill and by fused prefill, and show what reuse saves and changes.

    python examples/answer_over_documents.py --technique cacheblend --ratio 0.2

The documents in ``examples/documents`` are prefilled once. Every question of ``examples/questions.jsonl`` then has them
in another order, so that a prefix cache finds next to nothing of what repeats.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from kvweave.cli.environment import home_from_environment
from kvweave.errors import KvweaveError

HERE = Path(__file__).parent
INSTRUCTION = "\nAnswer with a few words, using the documents above.\nQuestion: "


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", help="demo, a model directory, a .gguf or .whl file, or a hub name")
    parser.add_argument("--technique", help="NAME or NAME:option=value; see: kvweave techniques")
    parser.add_argument("--ratio", type=float, help="share of reused tokens computed again, 0 to 1")
    parser.add_argument("--questions", type=int, metavar="N", help="only the first N questions")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    if options.questions is not None and options.questions < 1:
        parser.error("--questions: give 1 or more")
    try:
        run(options)
    except KvweaveError as error:
        print(f"answer_over_documents: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("answer_over_documents: Interrupted.", file=sys.stderr)
        return 1
    return 0


def run(options: argparse.Namespace) -> None:
    from kvweave import LLM, Document
    from kvweave.documents import read_documents
    from kvweave.reuse.registry import DEFAULT_TECHNIQUE, make_technique

    documents = {file.id: Document(file.text, id=file.id) for file in read_documents(HERE / "documents")}
    questions = [json.loads(line) for line in (HERE / "questions.jsonl").read_text().splitlines()][: options.questions]
    technique = make_technique(options.technique or DEFAULT_TECHNIQUE, ratio=options.ratio)
    with LLM(options.model, technique=technique, home=home_from_environment(), progress=say) as llm:
        start = time.perf_counter()
        prefilled = llm.precompute(list(documents.values()))
        seconds, tokens = time.perf_counter() - start, sum(item.computed_tokens for item in prefilled)
        say(f"{llm.name}: {len(documents)} documents ({tokens:,} tokens) prefilled in {seconds:.1f} s, once")
        results = []
        for number, question in enumerate(questions, start=1):
            results.append(ask(llm, [documents[name] for name in question["documents"]], question))
            if not options.json:
                show(number, results[-1])
    report = {"model": llm.name, "prefill_seconds": seconds, "questions": results, "summary": summarise(results)}
    print(json.dumps(report, indent=2) if options.json else sentence(report["summary"], technique.name))


def ask(llm: Any, documents: list[Any], question: dict[str, Any]) -> dict[str, Any]:
    """Both answers to one question, and how far apart the distributions of their first token are."""
    from kvweave import SamplingParams
    from kvweave.evaluation.metrics import kl_divergence

    messages = [{"role": "user", "content": [*documents, INSTRUCTION + question["question"]]}]
    # The answer to one question leaves its exact prefix behind: the head of the prompt, and with it the first document
    # if the next question starts with the same one. Forgetting it makes every row a prompt that was never seen, so that
    # the times compare full prefill with reuse of documents and nothing else. The documents' own KV stays.
    llm.reset_prefix_cache()
    sampling = SamplingParams(max_tokens=32)
    answers = {
        name: llm.chat(messages, sampling, **cache) for name, cache in (("full", {"technique": "full"}), ("fused", {}))
    }
    first = answers["full"].token_ids[:1]
    full, fused = (llm.score(messages, first, **cache).logits for cache in ({"technique": "full"}, {}))
    return {
        "question": question["question"],
        "expected": question["answer"],
        "first_token_kl": float(kl_divergence(full, fused)[0]),
        "same_text": answers["full"].text == answers["fused"].text,
        "speedup": answers["full"].reuse.timings["ttft_ms"] / answers["fused"].reuse.timings["ttft_ms"],
        **{name: {"answer": output.text, "reuse": output.reuse.to_json()} for name, output in answers.items()},
    }


def show(number: int, result: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{number}. {result['question']}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("prefill")
    for name in ("TTFT", "exact", "fused", "recomputed", "new"):
        table.add_column(name, justify="right")
    table.add_column("answer")
    for name in ("full", "fused"):
        reuse = result[name]["reuse"]
        counts = [f"{reuse[f'{kind}_tokens']:,}" for kind in ("cached", "fused", "recomputed", "prefilled")]
        answer = Text(" ".join(result[name]["answer"].split()))
        table.add_row(name, f"{reuse['timings']['ttft_ms']:,.0f} ms", *counts, answer)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    texts = "same text" if result["same_text"] else "other text"
    console.print(f" {result['speedup']:.1f} times sooner, first-token KL {result['first_token_kl']:.2g} nats, {texts}\n")


def summarise(results: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "questions": len(results),
        "speedup": sum(r["speedup"] for r in results) / len(results),
        "first_token_kl": sum(r["first_token_kl"] for r in results) / len(results),
        "same_text": sum(r["same_text"] for r in results),
        **{f"{name}_correct": sum(r["expected"] in r[name]["answer"] for r in results) for name in ("full", "fused")},
    }


def sentence(summary: dict[str, Any], technique: str) -> str:
    n = summary["questions"]
    return (
        f"{technique}, {n} question{'s' if n > 1 else ''}: first token {summary['speedup']:.1f} times sooner than by full "
        f"prefill, first-token KL {summary['first_token_kl']:.2g} nats, {summary['same_text']} of {n} texts the same; "
        f"right answers: {summary['fused_correct']} fused, {summary['full_correct']} full"
    )


def say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
