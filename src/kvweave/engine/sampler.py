"""From logits to a token, and the log probabilities of tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvweave.core.report import TokenLogprob
from kvweave.core.sampling import Constraint, SamplingParams
from kvweave.errors import InvalidRequest, ModelError

_NUCLEUS = (256, 4096)  # tokens: sizes to try before a full sort, which takes ten times as long
_LOGPROB_ROWS = 64  # rows whose log probabilities exist at once


class Sampler:
    """Chooses the tokens of one answer, and counts them.

    The order is vLLM's: tokens the constraint allows -> ``logit_bias`` -> ``min_tokens`` (no end-of-text and stop ids yet)
    -> repetition, frequency and presence penalty -> temperature -> ``min_p`` -> ``top_k`` -> ``top_p``. Log probabilities
    are the model's own, in front of all of that. Each drawn token takes one number from a generator that belongs to this
    answer alone: with a seed the answer depends on nothing else in the batch.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        eos_ids: frozenset[int] = frozenset(),
        constraint: Constraint | None = None,
    ) -> None:
        self.params = params
        self._constraint = constraint
        self._generator = torch.Generator()
        if params.seed is not None:
            self._generator.manual_seed(params.seed)
        else:
            self._generator.seed()
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.long)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self._ends = torch.tensor(sorted(eos_ids.union(params.stop_token_ids)), dtype=torch.long)
        self._produced = 0
        self._counts: Counter[int] = Counter()  # of the answer's tokens
        self._seen = torch.empty(0, dtype=torch.long)  # distinct tokens of prompt and answer
        if params.repetition_penalty != 1.0:
            self._seen = torch.tensor(sorted(set(prompt_ids)), dtype=torch.long)

    @property
    def finished(self) -> bool:
        """True if the constraint is satisfied and lets nothing follow."""
        return self._constraint is not None and self._constraint.finished

    def sample(self, logits: Tensor) -> tuple[int, TokenLogprob | None]:
        """``logits`` [vocabulary] -> token id, and its log probability (nats) if asked for.

        Raises:
            InvalidRequest: nothing may follow, or ``logit_bias`` names a token the model doesn't have.
            ModelError: a logit is NaN or +inf.
        """
        row = self._adjusted(logits) if self._adjusts else logits
        token = int(row.argmax())  # NaN counts as the largest
        best = float(row[token])
        if not math.isfinite(best):
            raise _unusable(best)
        if not self.params.greedy:
            token = self._draw(row, best)
        self._note(token)
        return token, self._logprob(logits, token)

    @property
    def _adjusts(self) -> bool:
        return bool(self._constraint is not None or self.params.logit_bias or self._too_short or self._penalises)

    @property
    def _penalises(self) -> bool:
        params = self.params
        return bool(params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty)

    @property
    def _too_short(self) -> bool:
        return self._produced < self.params.min_tokens

    def _adjusted(self, logits: Tensor) -> Tensor:
        """A copy [vocabulary], fp32 on the CPU, with everything that also changes what greedy decoding chooses."""
        row = logits.to("cpu", torch.float32, copy=True)
        if self._constraint is not None:
            row.masked_fill_(_forbidden(self._constraint.allowed(), len(row)), -math.inf)
        if len(self._bias_ids):
            if int(self._bias_ids.max()) >= len(row):
                raise InvalidRequest(
                    f"logit_bias names token {int(self._bias_ids.max())}, the model has ids below {len(row)}. Leave it out.",
                    param="logit_bias",
                )
            row[self._bias_ids] += self._bias
        if self._too_short:
            longer = row.index_fill(0, self._ends[self._ends < len(row)], -math.inf)
            if self._constraint is None or longer.max() > -math.inf:  # a complete answer ends, however short it is
                row = longer
        if self._penalises:
            self._penalise(row)
        return row

    def _penalise(self, row: Tensor) -> None:
        params = self.params
        if params.repetition_penalty != 1.0:
            values = row[self._seen]
            row[self._seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        if self._counts and (params.frequency_penalty or params.presence_penalty):
            ids, counts = torch.tensor(list(self._counts)), torch.tensor(list(self._counts.values()))
            row[ids] -= params.frequency_penalty * counts + params.presence_penalty

    def _draw(self, row: Tensor, best: float) -> int:
        """A token at random, from ``row`` [vocabulary] whose largest value is ``best``."""
        params = self.params
        weights = ((row.float().cpu() - best) / params.temperature).exp_()  # 1 for the most likely one: nothing overflows
        ids = None
        if params.min_p > 0.0:
            weights.masked_fill_(weights < params.min_p, 0.0)
        if params.top_p < 1.0 or 0 < params.top_k < len(weights):
            weights, ids = _most_likely(weights, params.top_k, params.top_p)
        mass = weights.cumsum(-1, dtype=torch.float64)
        point = torch.rand((), generator=self._generator, dtype=torch.float64) * mass[-1] * (1 - 2**-52)  # below the sum
        index = int(torch.searchsorted(mass, point, right=True))
        return index if ids is None else int(ids[index])

    def _note(self, token: int) -> None:
        if self._constraint is not None:
            self._constraint.accept(token)
        if self.params.repetition_penalty != 1.0 and not (self._seen == token).any():
            self._seen = torch.cat([self._seen, torch.tensor([token])])
        self._produced += 1
        self._counts[token] += 1

    def _logprob(self, logits: Tensor, token: int) -> TokenLogprob | None:
        if self.params.logprobs is None:
            return None
        return prompt_logprobs(logits[None], torch.tensor([token]), self.params.logprobs)[0]


def prompt_logprobs(logits: Tensor, next_ids: Tensor, top: int) -> list[TokenLogprob]:
    """Log probability (nats) of each row's next token, with the ``top`` most likely ones from the same floats.

    Args:
        logits: [k, vocabulary], any floating type.
        next_ids: [k], the tokens that follow.
    """
    found: list[TokenLogprob] = []
    for rows, ids in zip(logits.split(_LOGPROB_ROWS), next_ids.to(logits.device).split(_LOGPROB_ROWS), strict=True):
        logprobs = rows.float().log_softmax(-1)
        own = logprobs.gather(-1, ids[:, None])[:, 0]
        likely = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
        tops = [tuple(zip(*pair, strict=True)) for pair in zip(likely.indices.tolist(), likely.values.tolist(), strict=True)]
        found += map(TokenLogprob, ids.tolist(), own.tolist(), tops)
    return found


def _forbidden(allowed: bytes, vocabulary: int) -> Tensor:
    """[vocabulary] bool: what ``Constraint.allowed`` leaves out."""
    bits = np.unpackbits(np.frombuffer(allowed, np.uint8), count=vocabulary, bitorder="little")  # padded with zeros
    return torch.from_numpy(bits) == 0


def _most_likely(weights: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Weights and ids of the ``top_k`` most likely tokens, cut behind the one that reaches ``top_p`` of their sum."""
    n = len(weights)
    sizes = (top_k,) if 0 < top_k < n else (*(size for size in _NUCLEUS if size < n), n)
    for size in sizes:
        values, ids = weights.topk(size)
        mass = values.cumsum(-1, dtype=torch.float64)
        wanted = top_p * (mass[-1] if size == sizes[-1] else weights.sum(dtype=torch.float64))
        if mass[-1] >= wanted:
            break
    kept = int(torch.searchsorted(mass, wanted)) + 1
    return values[:kept], ids[:kept]


def _unusable(best: float) -> InvalidRequest | ModelError:
    if best == -math.inf:
        return InvalidRequest("No token may follow: response_format and min_tokens exclude all. Lower min_tokens.")
    return ModelError(f"The model gave a logit of {best}. Use dtype float32, or check its weights.")
