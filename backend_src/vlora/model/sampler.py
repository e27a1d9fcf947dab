"""Draws the next token of a request from its logits.

Random numbers are counter-based, keyed by (seed, position): batch, preemption and mode never
change a draw.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from vlora import backends, native
from vlora.backends import Backend
from vlora.model.choices import ChoiceMatcher
from vlora.model.vocabulary import Vocabulary
from vlora.request import DoubleArray, FloatArray, IndexArray, TokenLogprob
from vlora.sampling import SamplingParams

MASKED = np.float32(-np.inf)
FLOORS = tuple(math.exp(-power) for power in range(3, 31, 3))
"""Weights (the largest is 1) from which tokens are tried, one after the other, to hold top-p: of
152k words few hundred matter, and only these are sorted."""
LEAST_TEMPERATURE = 1e-30
"""Of fp32: a lower one draws the largest as this one does."""
ROUNDING = 1e-9
"""More than sums of so many weights in different orders can differ by."""


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

    @cached_property
    def plain(self) -> bool:
        """The next token depends on the logits as they are, and on nothing that came before."""
        params = self._params
        return (
            not params.min_tokens
            and params.logprobs is None
            and self.choices is None
            and params.repetition_penalty == 1.0
            and params.presence_penalty == 0.0
            and params.frequency_penalty == 0.0
        )

    @property
    def greedy(self) -> bool:
        """The next token is the largest of what is allowed."""
        return self._params.greedy

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
            token = int(allowed[self._pick(scores[allowed], len(prompt) + len(output))])
        else:
            token = self._pick(scores, len(prompt) + len(output))
        return Draw(token, self._logprobs(logits, token))

    def _pick(self, scores: FloatArray, position: int) -> int:
        """Index of the drawn one of some tokens' scores, at this position of the sequence."""
        if self._params.greedy:
            return int(scores.argmax())
        return draw(scores, self._params, self._uniform(position))

    def _uniform(self, position: int) -> float:
        generator = np.random.Philox(key=self._seed, counter=[position, 0, 0, 0])
        return float(np.random.Generator(generator).random())

    def _logprobs(self, logits: FloatArray, token: int) -> tuple[TokenLogprob, ...] | None:
        """The drawn token first, then the best ones, over the model's own distribution."""
        if self._params.logprobs is None:
            return None
        wide = logits.astype(np.float64)
        logprobs = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
        best = _largest(logprobs, self._params.logprobs).tolist()
        return tuple(
            TokenLogprob(
                token_id=index,
                logprob=float(logprobs[index]),
                rank=int((logprobs > logprobs[index]).sum()) + 1,
                text=self._vocabulary.text(index),
            )
            for index in dict.fromkeys([token, *best])
        )


def draw_rows(
    logits: torch.Tensor,
    rows: Sequence[tuple[int, TokenSampler, int]],
    *,
    backend: Backend | None = None,
) -> list[int]:
    """The tokens of several requests in one call, as `draw` has them (weights are fp32, so that one
    draw in some millions may fall on a neighbour).

    logits: [T, V] fp32, contiguous. rows: (row, plain sampler that is not greedy, position of the
    token in its sequence)."""
    if (backend or backends.backend_of("kernels")) == "reference":
        return [
            draw(logits[row].numpy(), sampler._params, sampler._uniform(position))
            for row, sampler, position in rows
        ]
    draws = []
    for row, sampler, position in rows:
        params = sampler._params
        uniform = sampler._uniform(position)
        heat = max(params.temperature, LEAST_TEMPERATURE)
        draws.append((row, params.top_k, heat, params.min_p, params.top_p, uniform))
    width, threads = logits.shape[1], torch.get_num_threads()
    found: list[int] = native.kernels().gemm.sample(logits.data_ptr(), width, draws, threads)
    return found


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


def _largest(values: DoubleArray, count: int) -> IndexArray:
    """Indices of the `count` largest values, best first, the lower index where they are equal."""
    likely = np.arange(values.size)
    if 0 < count < values.size:
        likely = _first(values, count, np.partition(values, -count)[-count])
    return likely[np.argsort(-values[likely], kind="stable")][:count]


def weights_of(scores: FloatArray, temperature: float) -> DoubleArray:
    """[V] fp32 scores → [V] float64 weights, the largest 1."""
    wide = torch.from_numpy(scores).double()
    weights: DoubleArray = wide.sub_(wide.max()).div_(temperature).exp_().numpy()
    return weights


def probabilities(scores: FloatArray, params: SamplingParams) -> DoubleArray:
    """[V] fp32 scores → [V] float64 distribution after temperature, min-p, top-k and top-p.

    The slow twin of `draw`: it sorts the whole vocabulary.
    """
    weights = weights_of(scores, params.temperature)
    # Whether numbers too small to be normal come out of the exponential depends on the CPU.
    weights[weights < max(params.min_p, sys.float_info.min)] = 0.0
    if 0 < params.top_k < weights.size:
        smallest = np.partition(weights, -params.top_k)[-params.top_k]
        weights[weights < smallest] = 0.0
    if params.top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        mass = np.cumsum(weights[order]) / weights.sum()
        # The smallest set that holds top_p: a token stays while the mass before it is short.
        weights[order[1:][mass[:-1] >= params.top_p]] = 0.0
    return np.asarray(weights / weights.sum())


def draw(scores: FloatArray, params: SamplingParams, uniform: float) -> int:
    """The token at `uniform` in [0, 1) of `probabilities(scores, params)`, to the bit, without
    sorting more of the vocabulary than the answer can depend on."""
    weights = weights_of(scores, params.temperature)
    kept = np.flatnonzero(weights >= max(params.min_p, sys.float_info.min))
    total = _only(weights, kept).sum()
    if 0 < params.top_k < kept.size:
        values = weights[kept]
        kept = kept[values >= np.partition(values, -params.top_k)[-params.top_k]]
        total = _only(weights, kept).sum()
    if params.top_p < 1.0:
        kept = _nucleus(weights, kept, total, params.top_p)
        total = _only(weights, kept).sum()
    mass = np.cumsum(weights[kept] / total)
    at = int(np.searchsorted(mass, uniform * mass[-1], side="right"))
    return int(kept[min(at, kept.size - 1)])


def _nucleus(weights: DoubleArray, kept: IndexArray, total: np.float64, top_p: float) -> IndexArray:
    """Of the tokens `kept` (ascending) the smallest set that holds `top_p` of their `total`."""
    values = weights[kept]
    likely = values
    for floor in FLOORS:
        above = values[values >= floor]
        if above.sum() > top_p * total * (1 + ROUNDING):
            likely = above
            break
    # Only the order of values matters to the sums; of equal ones the first stay.
    largest = np.sort(likely)[::-1]
    short = int(np.searchsorted(np.cumsum(largest) / total, top_p, side="left"))
    return kept if short >= largest.size else kept[_first(values, short + 1, largest[short])]


def _first(values: DoubleArray, count: int, smallest: np.float64) -> IndexArray:
    """Ascending indices of the `count` largest values, of which `smallest` is the least; of equal
    ones the lower indices."""
    above = np.flatnonzero(values > smallest)
    equal = np.flatnonzero(values == smallest)
    return np.sort(np.concatenate((above, equal[: count - above.size])))


def _only(weights: DoubleArray, kept: IndexArray) -> DoubleArray:
    """The weights with zeros for all but `kept`: sums depend on where the zeros are."""
    if kept.size == weights.size:
        return weights
    found = np.zeros_like(weights)
    found[kept] = weights[kept]
    return found
