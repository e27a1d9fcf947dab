"""Draws the next token of one request from its logits.

Random numbers are counter-based, keyed by (seed, position): batch, preemption and mode never
change a draw.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlora.model.choices import ChoiceMatcher
from vlora.model.vocabulary import Vocabulary
from vlora.request import DoubleArray, FloatArray, TokenLogprob
from vlora.sampling import SamplingParams

MASKED = np.float32(-np.inf)


@dataclass(frozen=True)
class Draw:
    """A token, and its log probability with the asked-for alternatives (None unless asked)."""

    token: int
    logprobs: tuple[TokenLogprob, ...] | None


class TokenSampler:
    """The sampling state of one request; survives preemption unchanged."""

    def __init__(
        self,
        params: SamplingParams,
        request_id: str,
        eos_tokens: Sequence[int],
        vocabulary: Vocabulary,
    ) -> None:
        self._params = params
        self._vocabulary = vocabulary
        self._eos = tuple(eos_tokens)
        self._seed = _seed(params.seed, request_id)
        self.choices = ChoiceMatcher(params.choices, vocabulary) if params.choices else None
        self.ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._eos))

    @property
    def plain_greedy(self) -> bool:
        """The next token is the largest logit, whatever came before."""
        params = self._params
        return (
            params.greedy
            and not params.min_tokens
            and params.logprobs is None
            and self.choices is None
            and params.repetition_penalty == 1.0
            and params.presence_penalty == 0.0
            and params.frequency_penalty == 0.0
        )

    def draw(
        self, logits: FloatArray, prompt: Sequence[int], output: Sequence[int], budget: int
    ) -> Draw:
        """logits: [V] fp32 of the position after `output`; budget: tokens the answer has left."""
        params = self._params
        scores = _penalised(logits, params, prompt, output)
        if len(output) < params.min_tokens:
            scores[[*self._eos, *params.stop_token_ids]] = MASKED
        if self.choices is not None:
            allowed = self.choices.allowed(self._eos, budget)
            kept = scores[allowed]
            scores[:] = MASKED
            scores[allowed] = kept
        if params.greedy:
            token = int(scores.argmax())
        else:
            token = _inverse_cdf(
                probabilities(scores, params), self._uniform(len(prompt) + len(output))
            )
        return Draw(token, self._logprobs(logits, token))

    def _uniform(self, position: int) -> float:
        generator = np.random.Philox(key=self._seed, counter=[position, 0, 0, 0])
        return float(np.random.Generator(generator).random())

    def _logprobs(self, logits: FloatArray, token: int) -> tuple[TokenLogprob, ...] | None:
        """The drawn token first, then the best ones, over the model's own distribution."""
        if self._params.logprobs is None:
            return None
        wide = logits.astype(np.float64)
        logprobs = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
        best = np.argsort(-logprobs, kind="stable")[: self._params.logprobs].tolist()
        return tuple(
            TokenLogprob(
                token_id=index,
                logprob=float(logprobs[index]),
                rank=int((logprobs > logprobs[index]).sum()) + 1,
                text=self._vocabulary.text(index),
            )
            for index in dict.fromkeys([token, *best])
        )


def _seed(seed: int | None, request_id: str) -> int:
    if seed is not None:
        return seed % 2**64
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "little")


def _penalised(
    logits: FloatArray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> FloatArray:
    """A copy with repetition (prompt and output), presence and frequency (output) penalties."""
    scores = logits.astype(np.float32, copy=True)
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.asarray([*prompt, *output], dtype=np.int64))
        kept = scores[seen]
        penalty = np.float32(params.repetition_penalty)
        scores[seen] = np.where(kept > 0, kept / penalty, kept * penalty)
    if output and (params.presence_penalty or params.frequency_penalty):
        tokens, counts = np.unique(np.asarray(output, dtype=np.int64), return_counts=True)
        scores[tokens] -= np.float32(params.presence_penalty)
        scores[tokens] -= (params.frequency_penalty * counts).astype(np.float32)
    return scores


def probabilities(scores: FloatArray, params: SamplingParams) -> DoubleArray:
    """[V] fp32 scores → [V] float64 distribution after temperature, min-p, top-k and top-p."""
    wide = scores.astype(np.float64) / params.temperature
    weights = np.exp(wide - wide.max())
    if params.min_p > 0.0:
        weights[weights < params.min_p * weights.max()] = 0.0
    if 0 < params.top_k < weights.size:
        smallest = np.partition(weights, -params.top_k)[-params.top_k]
        weights[weights < smallest] = 0.0
    if params.top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        mass = np.cumsum(weights[order]) / weights.sum()
        # The smallest set that holds top_p: a token stays while the mass before it is short.
        weights[order[1:][mass[:-1] >= params.top_p]] = 0.0
    return np.asarray(weights / weights.sum())


def _inverse_cdf(distribution: DoubleArray, uniform: float) -> int:
    mass = np.cumsum(distribution)
    token = int(np.searchsorted(mass, uniform * mass[-1], side="right"))
    return min(token, int(np.flatnonzero(distribution)[-1]))
