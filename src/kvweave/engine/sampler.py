"""From logits to a token: greedy, temperature, top-k, top-p, with log probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvweave.core.report import TokenLogprob
from kvweave.core.sampling import Constraint, SamplingParams


class Sampler:
    """Chooses one request's tokens; a seed makes the sequence of choices reproducible."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        eos_ids: frozenset[int] = frozenset(),
        constraint: Constraint | None = None,
    ) -> None:
        self.params = params
        self._generator = torch.Generator()
        if params.seed is not None:
            self._generator.manual_seed(params.seed)
        else:
            self._generator.seed()

    def sample(self, logits: Tensor) -> tuple[int, TokenLogprob | None]:
        """``logits`` [vocabulary] -> token id, and its log probability if asked for (before temperature and filters)."""
        logits = logits.float().cpu()
        if self.params.temperature == 0.0:
            token = int(logits.argmax())
        else:
            scaled = (logits.double() - logits.max()) / self.params.temperature  # <= 0: no temperature can overflow
            weights = torch.softmax(self._filter(scaled), -1)
            token = int(torch.multinomial(weights, 1, generator=self._generator))
        return token, self._logprob(logits, token)

    def _filter(self, logits: Tensor) -> Tensor:
        k, p = self.params.top_k, self.params.top_p
        if 0 < k < logits.numel():
            logits = logits.masked_fill(logits < logits.topk(k).values[-1], float("-inf"))
        if p < 1.0:
            values, order = logits.sort(descending=True)
            mass = values.softmax(-1).cumsum(-1)
            cut = order[1:][mass[:-1] >= p]  # the token that reaches p is kept
            logits = logits.index_fill(0, cut, float("-inf"))
        return logits

    def _logprob(self, logits: Tensor, token: int) -> TokenLogprob | None:
        n = self.params.logprobs
        if n is None:
            return None
        logprobs = logits.log_softmax(-1)
        values, ids = logprobs.topk(n)
        return TokenLogprob(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))

    @property
    def finished(self) -> bool:
        """True if a constraint allows nothing more."""
        return False


def prompt_logprobs(logits: Tensor, next_ids: Tensor, top: int) -> list[TokenLogprob]:
    """``logits`` [k, vocabulary] of rows whose next tokens are ``next_ids`` [k]."""
    logprobs = logits.float().log_softmax(-1)
    found = []
    for row, token in zip(logprobs, next_ids.tolist(), strict=True):
        values, ids = row.topk(top)
        found.append(TokenLogprob(token, float(row[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True))))
    return found
