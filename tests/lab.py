"""A small engine over a tiny random model, driven by token ids: what most tests stand on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvweave.attention import make_backend
from kvweave.core.keys import ModelFingerprint
from kvweave.core.prompt import Document, TokenPrompt, TokenSpan
from kvweave.core.report import ReuseReport
from kvweave.core.sampling import SamplingParams
from kvweave.engine.engine import Engine
from kvweave.engine.parts import EngineParts
from kvweave.engine.precompute import precompute
from kvweave.engine.sequence import Request
from kvweave.engine.sequence import Sequence as Running
from kvweave.index.chunks import ChunkIndex, Chunking
from kvweave.kv.pool import KVPool
from kvweave.reuse.base import Technique
from kvweave.reuse.registry import make_technique
from kvweave.store.host import HostStore
from kvweave.store.tiered import TieredStore
from tests.matrix import adapter, native_logits

BOS = 1
CHUNKING = Chunking(size=32, min_tokens=8)


class NoText:
    """A decoder for models without a tokenizer."""

    def __init__(self, skip_special_tokens: bool = True) -> None: ...

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


@dataclass
class Result:
    """``logits`` [k, vocabulary] of the last prompt tokens; ``keys``/``values`` per layer [kv_heads, T, dim]."""

    logits: Tensor
    report: ReuseReport
    keys: list[Tensor]
    values: list[Tensor]
    token_ids: tuple[int, ...]


@dataclass
class Lab:
    """One engine. Documents are lists of ids; a prompt is a list of ids and documents."""

    family: str = "llama"
    attention: str = "blocked"
    slots: int = 1024
    prefill_rows: int = 512
    max_step_rows: int = 512
    min_reuse_tokens: int = 0
    chunking: Chunking = CHUNKING
    tenant: str = "t"
    max_sequences: int = 256
    swap_bytes: int = 2**30
    cache_bytes: int = 2**30
    anchors: tuple[tuple[int, ...], ...] = ((BOS,),)
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        model = adapter(self.family)
        fingerprint = ModelFingerprint.of(content=self.family)
        self.model = model
        self.store = self.make_store()
        self.engine = Engine(
            EngineParts(
                adapter=model,
                pool=KVPool(model.layout, self.slots, model.device),
                attention=make_backend(self.attention),
                chunks=ChunkIndex(self.store, fingerprint, self.tenant, self.chunking),
                make_decoder=NoText,
                eos_ids=frozenset(),
                context_length=model.context_length,
                prefill_rows=self.prefill_rows,
                max_step_rows=self.max_step_rows,
                min_reuse_tokens=self.min_reuse_tokens,
                max_sequences=self.max_sequences,
                swap_bytes=self.swap_bytes,
            )
        )

    def make_store(self) -> TieredStore:
        return TieredStore(HostStore(self.cache_bytes))

    def precompute(self, *documents: Sequence[int], anchor: Sequence[int] = (BOS,)) -> None:
        for ids in documents:
            precompute(self.engine, ids, anchor)

    def add(self, prompt: TokenPrompt, technique: str | Technique, *, keep: int = 1, max_tokens: int = 0) -> Running:
        made = make_technique(technique)
        request = Request(prompt, SamplingParams(max_tokens=max_tokens), made, made.reuse, self.anchors, keep)
        return self.engine.add(request)

    def run(self, prompt: TokenPrompt, technique: str | Technique, *, keep: int = 1, max_tokens: int = 0) -> Result:
        sequence = self.add(prompt, technique, keep=keep, max_tokens=max_tokens)
        self.engine.run([sequence])
        self.engine.check_integrity()
        return self.result(sequence)

    def result(self, sequence: Running) -> Result:
        assert sequence.output is not None
        assert sequence.lookup is not None
        slots = sequence.lookup.plan_request.slots
        pool = self.engine.parts.pool
        return Result(
            torch.cat(sequence.prompt_logits),
            sequence.output.reuse,
            [k[:, slots].clone() for k in pool.keys],
            [v[:, slots].clone() for v in pool.values],
            sequence.output.token_ids,
        )

    def forget_prefixes(self) -> None:
        self.engine.tree.clear()
        self.engine.check_integrity()

    def native(self, prompt: TokenPrompt) -> Tensor:
        """[T, vocabulary]: the model's own eager forward."""
        return native_logits(self.model, torch.tensor(prompt.token_ids))

    def fresh(self, **changes: object) -> Lab:
        """Another engine over the same model with an empty cache."""
        fields = {k: v for k, v in self.__dict__.items() if k in self.__dataclass_fields__ and k != "engine"}
        return Lab(**(fields | changes))  # type: ignore[arg-type]


def doc(n: int, seed: int) -> list[int]:
    return torch.randint(3, 128, (n,), generator=torch.Generator().manual_seed(1000 + seed)).tolist()


def prompt_of(*parts: list[int] | tuple[str, list[int]]) -> TokenPrompt:
    """``("doc", ids)`` is a document, a list of ids is text."""
    spans = []
    for part in parts:
        if isinstance(part, tuple):
            spans.append(TokenSpan(tuple(part[1]), Document(f"{len(spans)}")))
        else:
            spans.append(TokenSpan(tuple(part)))
    return TokenPrompt(tuple(spans))


def standard(seed: int = 0) -> tuple[list[list[int]], TokenPrompt]:
    """Three documents (one of two pieces) behind BOS and some text, and a question."""
    documents = [doc(24, seed), doc(56, seed + 1), doc(20, seed + 2)]
    prompt = prompt_of([BOS, 5, 9], *(("doc", d) for d in documents), doc(7, seed + 3))
    return documents, prompt


def close(a: Tensor, b: Tensor, *, atol: float = 1e-4) -> bool:
    """Equal within ``atol``, relative to outputs larger than 10."""
    return bool((a - b).abs().max() <= atol * max(1.0, float(b.abs().max()) / 10))
