"""How close two answers, or two distributions over the next token, are. Pure functions: no models, no files, no state.

Text metrics follow the CacheBlend evaluation (arXiv:2405.16444): F1 on the first output line for question answering,
ROUGE-L for summarisation. Scores are fractions from 0 to 1, never percentages.
"""

from __future__ import annotations

import re
import statistics
import string
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from kvweave.errors import InvalidOption, MissingExtra

Tokenise = Callable[[str], Sequence[Hashable]]

_DRAWS_AT_ONCE = 1_000_000
"""Indices drawn at a time in the bootstrap (8 MB), so that memory doesn't grow with resamples x values."""


class Summary(TypedDict):
    """What a report prints of a series; ``mean``, ``median`` and ``p95`` have the unit of the values."""

    mean: float
    median: float
    p95: float
    n: int


# --- text -------------------------------------------------------------------------------------------------------------


def normalise(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles (a, an, the), single spaces, as SQuAD's evaluation script does."""
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def first_line(text: str) -> str:
    """The first line with something on it. Small models go on after the answer; what follows is not part of it."""
    return text.strip().split("\n", 1)[0]


def token_f1(prediction: str, answers: Sequence[str], tokenise: Tokenise | None = None) -> float:
    """F1 of the words that the prediction's first line shares with an answer, the best over ``answers``; in [0, 1].

    Source: SQuAD (arXiv:1606.05250) and its evaluation script 2.0: both sides normalised, words counted with
    multiplicity; where one side has no words left the score is 1 if the other has none either, else 0.

    Args:
        prediction: the model's output.
        answers: alternatives, at least one.
        tokenise: what to count in place of words, applied to the normalised text. The CacheBlend authors count model
            tokens, which scores part of a name as a partial hit: pass the tokenizer's ``encode``, no special tokens.

    Raises:
        InvalidOption: ``answers`` is empty or a bare string.
    """
    split: Tokenise = str.split if tokenise is None else tokenise
    predicted = split(normalise(first_line(prediction)))
    return max(_f1(predicted, split(normalise(answer))) for answer in _several(answers, "answers"))


def _f1(predicted: Sequence[Hashable], expected: Sequence[Hashable]) -> float:
    if not predicted or not expected:
        return float(len(predicted) == len(expected))
    common = (Counter(predicted) & Counter(expected)).total()
    return 2 * common / (len(predicted) + len(expected))


def exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """Whether the prediction's first line equals one of ``answers`` after SQuAD normalisation.

    Raises:
        InvalidOption: ``answers`` is empty or a bare string.
    """
    predicted = normalise(first_line(prediction))
    return any(predicted == normalise(answer) for answer in _several(answers, "answers"))


def rouge_l(prediction: str, references: Sequence[str]) -> float:
    """ROUGE-L f-measure with stemming, the best over ``references``; in [0, 1]. The whole prediction counts.

    The metric of the SAMSum paper (arXiv:1911.12237) and of CacheBlend, by Google's rouge-score. Not the summary-level
    ROUGE-Lsum, which treats line ends as sentence ends.

    Raises:
        InvalidOption: ``references`` is empty or a bare string.
        MissingExtra: rouge-score is not installed.
    """
    references = _several(references, "references")
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise MissingExtra("rouge-score", "eval", "The metric ROUGE-L") from error
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    return max(float(scorer.score(reference, prediction)["rougeL"].fmeasure) for reference in references)


def _several(texts: Sequence[str], name: str) -> Sequence[str]:
    # A bare string is a sequence of letters to Python, and a wrong score to everyone else.
    if isinstance(texts, str) or not texts:
        raise InvalidOption(f"'{name}' must be a list of at least one text.")
    return texts


# --- distributions ----------------------------------------------------------------------------------------------------


def kl_divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p || q) of the softmaxes over the last dimension, in nats; p is the reference (full prefill), q the judged.

    Args:
        p_logits: [n, vocabulary] (or any shape with the vocabulary last), any floating type; ``-inf`` excludes a token.
        q_logits: the same shape, on the same device.

    Returns:
        [n], float64 if an input is, else float32; never below 0. ``inf`` where q excludes a token that p allows,
        ``nan`` where a row holds ``nan`` or excludes every token: a broken row never looks like agreement.

    Raises:
        InvalidOption: the shapes differ or have no vocabulary.
    """
    _check_logits(p_logits, q_logits)
    precise = torch.float64 in (p_logits.dtype, q_logits.dtype)
    dtype = torch.float64 if precise else torch.float32
    log_p = torch.log_softmax(p_logits.to(dtype), dim=-1)
    log_q = torch.log_softmax(q_logits.to(dtype), dim=-1)
    p = log_p.exp()
    # 0 log 0 is 0, but computes as nan. The test is for exactly 0, so that nan stays nan.
    terms = torch.where(p == 0, torch.zeros_like(p), p * (log_p - log_q))
    return terms.sum(dim=-1).clamp_min(0)


def top1_agreement(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Per row 1.0 where greedy decoding may take the same token from both, else 0.0; the mean is the agreement rate.

    With ties (common in bfloat16) a row agrees if some token is a maximum of both. A row with ``nan``, or that excludes
    every token, agrees with nothing.

    Args:
        p_logits: [n, vocabulary] (or any shape with the vocabulary last).
        q_logits: the same shape, on the same device.

    Returns:
        [n] float32.

    Raises:
        InvalidOption: the shapes differ or have no vocabulary.
    """
    _check_logits(p_logits, q_logits)
    p_top = p_logits == p_logits.amax(dim=-1, keepdim=True)
    q_top = q_logits == q_logits.amax(dim=-1, keepdim=True)
    return (p_top & q_top & (p_logits > -torch.inf)).any(dim=-1).float()


def _check_logits(p: Tensor, q: Tensor) -> None:
    if p.shape != q.shape or p.ndim == 0 or p.shape[-1] == 0:
        raise InvalidOption(
            f"The logits have the shapes {list(p.shape)} and {list(q.shape)}. Give the same [n, vocabulary] for both."
        )


# --- series -----------------------------------------------------------------------------------------------------------


def paired_bootstrap(
    a: Sequence[float],
    b: Sequence[float],
    resamples: int = 10_000,
    seed: int = 0,
    clusters: Sequence[Hashable] | None = None,
) -> tuple[float, float, float]:
    """Mean of ``a - b`` with its 95 % percentile interval, by resampling pairs (Efron and Tibshirani 1993, chapter 13).

    Args:
        a: [n] scores of one method, in any unit.
        b: [n] scores of the other on the same examples in the same order.
        resamples: how many resamples are drawn.
        seed: the same seed gives the same interval.
        clusters: [n] labels. Examples with one label are drawn together: give the document, conversation or prompt
            where several examples share one, else the interval is too narrow.

    Returns:
        ``(mean difference, low, high)`` in the unit of the scores. With one example or cluster the interval is that one
        point, which says nothing about its width.

    Raises:
        InvalidOption: lengths differ, there are no values, one is not finite, or ``resamples`` is below 1.
    """
    if resamples < 1:
        raise InvalidOption(f"resamples is {resamples}; give at least 1.")
    if len(a) != len(b) or (clusters is not None and len(clusters) != len(a)):
        lengths = [len(a), len(b), *([] if clusters is None else [len(clusters)])]
        raise InvalidOption(f"Paired values must be equally many, got {lengths}.")
    pairs = np.array([a, b], dtype=np.float64)  # [2, n]
    if not pairs.size or not np.isfinite(pairs).all():
        raise InvalidOption("Paired values must be at least one pair of finite numbers.")
    difference = pairs[0] - pairs[1]  # [n]
    labels: Sequence[Hashable] = range(len(a)) if clusters is None else clusters
    index = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    owner = np.array([index[label] for label in labels])  # [n]
    sums = np.bincount(owner, weights=difference)  # [groups]
    counts = np.bincount(owner)  # [groups]
    means = _resampled_means(sums, counts, resamples, np.random.default_rng(seed))
    low, high = np.percentile(means, [2.5, 97.5])
    return float(difference.mean()), float(low), float(high)


def _resampled_means(sums: np.ndarray, counts: np.ndarray, resamples: int, generator: np.random.Generator) -> np.ndarray:
    """[resamples] means over all values of the groups drawn: larger groups weigh more, as in the plain mean."""
    groups = len(sums)
    step = max(1, _DRAWS_AT_ONCE // groups)
    means = []
    for start in range(0, resamples, step):
        drawn = generator.integers(groups, size=(min(step, resamples - start), groups))
        means.append(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    return np.concatenate(means)


def upper_bound(values: Sequence[float], resamples: int = 10_000, seed: int = 0) -> float:
    """Upper 95 % bound (one-sided) of the mean of the distribution that ``values`` are drawn from, by bootstrap-t.

    Divergences are skewed to the right: the few large ones may be missing from a small sample. Bounds by Student's t and by
    percentiles are then too low; studentising the resampled means corrects for the skew (Efron and Tibshirani 1993, 12.5).

    Args:
        values: [n] in any unit, independent of each other.
        resamples: how many resamples are drawn.
        seed: the same seed gives the same bound.

    Returns:
        The bound, in the unit of the values; ``inf`` where they are too alike but for a few to tell (most are equal).

    Raises:
        InvalidOption: there are fewer than two values, one is not finite, or ``resamples`` is below 1.
    """
    sample = np.array(values, dtype=np.float64)  # [n]
    if sample.size < 2 or not np.isfinite(sample).all() or resamples < 1:
        raise InvalidOption("A bound needs at least two finite values, and one resample.")
    mean, error = sample.mean(), _standard_error(sample)
    if error == 0:
        return float(mean)
    generator = np.random.default_rng(seed)
    step = max(1, _DRAWS_AT_ONCE // sample.size)
    studentised = []
    for start in range(0, resamples, step):
        drawn = sample[generator.integers(sample.size, size=(min(step, resamples - start), sample.size))]  # [step, n]
        with np.errstate(divide="ignore", invalid="ignore"):  # all values of a resample may be equal
            studentised.append((drawn.mean(axis=1) - mean) / _standard_error(drawn))
    t = np.nan_to_num(np.concatenate(studentised), nan=0.0, posinf=np.inf, neginf=-np.inf)
    return float(mean - np.quantile(t, 0.05, method="lower") * error)


def _standard_error(values: np.ndarray) -> np.ndarray:
    """Of the mean over the last dimension."""
    return values.std(axis=-1, ddof=1) / np.sqrt(values.shape[-1])


def summarise(values: Sequence[float]) -> Summary:
    """Mean, median, 95th percentile (nearest rank: always one of the values) and number of ``values``, in their unit.

    Raises:
        InvalidOption: there are no values, or one is ``nan``.
    """
    numbers = sorted(float(value) for value in values)
    if not numbers or any(number != number for number in numbers):
        raise InvalidOption("A summary needs at least one value, and no 'nan' among them.")
    rank = -(-95 * len(numbers) // 100)
    return Summary(
        mean=sum(numbers) / len(numbers),
        median=statistics.median(numbers),
        p95=numbers[rank - 1],
        n=len(numbers),
    )
