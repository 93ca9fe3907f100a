"""From document files and a question to a prompt that fits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvweave.core.prompt import Document, Prompt, TokenPrompt
from kvweave.documents import DocumentFile
from kvweave.errors import ContextLengthExceeded, PromptExceedsPool

if TYPE_CHECKING:
    from kvweave.llm import LLM

INSTRUCTION = "\nAnswer with a few words, using the documents above.\nQuestion: "
SEPARATOR = "\n\n"  # between the segments of a prompt without a chat template


def to_documents(files: Sequence[DocumentFile]) -> list[Document]:
    """With ids as the library wants them: file names may hold anything."""
    documents: list[Document] = []
    taken: set[str] = set()
    for number, file in enumerate(files, start=1):
        label = re.sub(r"[^A-Za-z0-9._:@-]+", "_", file.id)[-100:]
        label = f"{number}:{label}" if label in taken else label
        taken.add(label)
        documents.append(Document(file.text, id=label, title=file.title))
    return documents


def make_prompt(llm: LLM, documents: Sequence[Document], question: str) -> Prompt:
    """Documents, then the question: as a chat if the model has a template, else as plain segments."""
    if llm.tokenizer.has_chat_template:
        return llm.render([{"role": "user", "content": [*documents, INSTRUCTION + question]}])
    return Prompt([part for document in documents for part in (document, SEPARATOR)] + [question])


def check_fits(llm: LLM, prompt: Prompt, max_tokens: int) -> TokenPrompt:
    """The prompt's tokens; raises an error that says how many documents fit before any of them is computed."""
    tokens = llm.tokenizer.tokenise(prompt)
    n, parts = len(tokens.token_ids), llm.engine.parts
    limit, slots = parts.context_length, parts.pool.num_slots
    answer = min(max_tokens, max(1, limit - n))
    if n + min(1, max_tokens) > limit:
        fit = _documents_that_fit(tokens, limit - min(1, max_tokens))
        raise ContextLengthExceeded(
            f"The prompt has {n:,} tokens, the limit is {limit:,} with the answer: {fit}. "
            "Name fewer documents, or use a model with a longer context."
        )
    if n + max(0, answer - 1) > slots:
        fit = _documents_that_fit(tokens, slots - max(0, answer - 1))
        raise PromptExceedsPool(
            f"Prompt and answer need {n + max(0, answer - 1):,} slots, the KV pool has {slots:,}: {fit}. "
            "Name fewer documents, or raise --kv-pool."
        )
    return tokens


def _documents_that_fit(tokens: TokenPrompt, room: int) -> str:
    """How many of the first documents fit ``room`` tokens beside the text in front of and behind all of them."""
    places = [i for i, span in enumerate(tokens.spans) if span.document is not None]
    sizes = [len(span.token_ids) for span in tokens.spans]
    used = sum(sizes[: places[0]]) + sum(sizes[places[-1] + 1 :])
    count, start = 0, places[0]
    for place in places:
        used += sum(sizes[start : place + 1])
        start = place + 1
        if used > room:
            break
        count += 1
    return f"the first {count} of {len(places)} documents fit" if count else "not even the first document fits"
