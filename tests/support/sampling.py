"""The definition of sampling, by transformers' own processors in vLLM's order, and tests of draws.

vLLM's order: penalties, banned tokens, temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from transformers.generation import logits_process as theirs

from vlora.request import BoolArray, DoubleArray, FloatArray
from vlora.sampling import SamplingParams

SIZE = 32  # A power of two: the mass of equal tokens is exact, so top-p cuts exactly at its limit.

# Filters with common values, those at their limits, and those next to the size of the vocabulary.
FILTERS: list[dict[str, float]] = [
    {},
    *({"temperature": value} for value in (0.01, 0.7, 100.0)),
    *({"top_k": value} for value in (1, 2, 7, SIZE - 1, SIZE, SIZE + 1)),
    *({"top_p": value} for value in (1e-9, 0.25, 0.5, 0.9, 0.999999)),
    *({"min_p": value} for value in (1e-6, 0.05, 0.5, 1.0)),
    {"temperature": 2.0, "min_p": 0.1, "top_k": 5, "top_p": 0.8},
    {"temperature": 0.5, "top_k": 9, "top_p": 0.5},
    {"temperature": 1.5, "min_p": 0.2, "top_p": 0.6},
    {"min_p": 0.01, "top_k": 3},
]


def drawn_scores() -> list[FloatArray]:
    """Return rows of SIZE scores: of both signs, negative, with ties, equal, and half masked."""
    rng = np.random.default_rng(39)
    scores = 2 * rng.normal(size=SIZE)
    masked = np.where(rng.permutation(SIZE) < SIZE // 2, -np.inf, np.round(scores))
    rows = (scores, scores - 20, np.round(scores), np.full(SIZE, -0.5), masked)
    return [row.astype(np.float32) for row in rows]


def processed(
    logits: FloatArray,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    ends: Collection[int],
    allowed: BoolArray | None = None,
) -> FloatArray:
    """Return the scores after penalties and bans, [vocabulary] fp32.

    ends: tokens that are banned before `min_tokens`.
    """
    ids, scores = torch.tensor([[*prompt, *output]]).long(), torch.tensor(logits)[None]
    scores = theirs.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    # transformers lacks these two penalties. In vLLM, tokens of the prompt do not count.
    for token in set(output):
        scores[0, token] -= params.frequency_penalty * output.count(token)
        scores[0, token] -= params.presence_penalty
    banned = theirs.MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, list(ends))
    scores = banned(ids, scores)
    if allowed is not None:
        forbidden = np.flatnonzero(~allowed).tolist()
        scores = theirs.SuppressTokensLogitsProcessor(forbidden)(ids, scores)
    return np.asarray(scores[0])


def distribution(scores: FloatArray, params: SamplingParams) -> DoubleArray:
    """Return the probability of each token, [vocabulary], after all filters."""
    row = torch.tensor(scores).double()[None]
    row = theirs.TemperatureLogitsWarper(params.temperature)(None, row)
    row = theirs.MinPLogitsWarper(params.min_p)(None, row)
    if params.top_k:
        row = theirs.TopKLogitsWarper(params.top_k)(None, row)
    if params.top_p < 1.0:
        kept = int(theirs.TopPLogitsWarper(params.top_p)(None, row).isfinite().sum())
        # Of equal tokens, transformers drops any. The rule here is to keep the lowest ids.
        order = row[0].sort(descending=True, stable=True).indices
        row[0, order[kept:]] = -torch.inf
    return np.asarray(row[0].softmax(0))


def are_quantiles(
    tokens: Sequence[int], uniforms: Sequence[float], expected: DoubleArray
) -> BoolArray:
    """Return for each token whether it is the quantile of `expected` at its uniform number.

    The tolerance is that of weights in fp32.
    """
    ends, at = np.cumsum(expected)[tokens], np.asarray(uniforms)
    begins = ends - expected[tokens]
    return (expected[tokens] > 0) & (begins - 1e-5 <= at) & (at <= ends + 1e-5)


def excess_chi_squared(tokens: Sequence[int], expected: DoubleArray) -> float:
    """Return the standard deviations by which chi-squared exceeds its mean; infinite if a token of
    probability zero was drawn.

    Tokens that are expected fewer than five times are counted together.
    """
    counts = np.bincount(tokens, minlength=expected.size).astype(float)
    if counts[expected == 0].any():
        return float("inf")
    wanted = expected * len(tokens)
    rare = wanted < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    counts, wanted = counts[wanted > 0], wanted[wanted > 0]
    chi_squared = float(((counts - wanted) ** 2 / wanted).sum())
    freedom = max(1, wanted.size - 1)
    return (chi_squared - freedom) / (2 * freedom) ** 0.5
