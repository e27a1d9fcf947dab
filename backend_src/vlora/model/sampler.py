"""Sampling of a request's next token from its logits.

Random numbers are counter-based: they depend on a seed and a position only, not on the batch, on
preemption or on the mode.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from vlora import backends, native
from vlora.backends import Backend
from vlora.device.device import upload
from vlora.kernels import on_gpu
from vlora.model.choices import ChoiceMatcher
from vlora.model.tokenizer import Vocabulary
from vlora.request import BoolArray, DoubleArray, FloatArray, IndexArray, TokenLogprob
from vlora.sampling import SamplingParams

MASKED = np.float32(-np.inf)

UNIFORMS_AHEAD = 16  # Number of positions whose random numbers are computed in one call.

# Thresholds that the search for the top-p set tries in turn. The maximum weight is 1. Usually, only
# a few hundred of 152k tokens are above such a threshold, and only they are sorted.
WEIGHT_FLOORS = tuple(math.exp(-power) for power in range(3, 31, 3))

# Minimum temperature by which fp32 logits are divided. It gives the largest logit all weight.
MIN_FP32_TEMPERATURE = 1e-30

# Upper bound of the relative difference between sums of the same weights in different orders.
SUM_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Draw:
    """A drawn token, with the log probabilities of it and its alternatives if requested."""

    token: int
    logprobs: tuple[TokenLogprob, ...] | None


class Uniforms:
    """Random numbers in [0, 1) that depend only on a seed in [0, 2**64) and a position.

    Each position has a block of numbers of the generator Philox4x64-10, of which the first is used.
    The numbers of UNIFORMS_AHEAD positions take little longer than one; creating a generator takes
    twenty times as long, so it is reused.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generator: np.random.Philox | None = None
        self._first = 0
        self._numbers: list[float] = []

    def at(self, position: int) -> float:
        """Return the random number that belongs to a position. Positions begin at 0."""
        index = position - self._first
        if not 0 <= index < len(self._numbers):
            if self._generator is None or index != len(self._numbers):
                self._generator = np.random.Philox(key=self._seed, counter=[position, 0, 0, 0])
            blocks = self._generator.random_raw(4 * UNIFORMS_AHEAD)[::4]
            self._numbers = ((blocks >> np.uint64(11)) * 2.0**-53).tolist()
            self._first, index = position, 0
        return self._numbers[index]


class TokenSampler:
    """Sampling state of one request. Preemption does not change it.

    choices: state of an answer that must be one of the request's `choices`, else None.
    ends: ids of the tokens that end the answer.
    """

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
        self._uniforms = Uniforms(_seed(params.seed, request_id))
        self.choices = ChoiceMatcher(params.choices, vocabulary) if params.choices else None
        self._words = {word: vocabulary.tokens_of_word(word) for word in params.word_probabilities}
        self.ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._eos))

    @cached_property
    def batchable(self) -> bool:
        """True if the next token depends only on the logits, so that rows can be drawn together.
        The logits of a structured request must be masked first.
        """
        params = self._params
        return (
            not params.min_tokens
            and params.logprobs is None
            and not params.word_probabilities
            and self.choices is None
            and params.repetition_penalty == 1.0
            and params.presence_penalty == 0.0
            and params.frequency_penalty == 0.0
        )

    @property
    def greedy(self) -> bool:
        return self._params.greedy

    def draw(
        self,
        logits: FloatArray,
        prompt: Sequence[int],
        output: Sequence[int],
        budget: int,
        mask: BoolArray | None = None,
    ) -> Draw:
        """Draw and return the token that follows `prompt` and `output`.

        logits: [vocabulary] fp32 of that position.
        budget: number of tokens left for the answer.
        mask: [vocabulary] bool, True for each token that may be drawn, at least one; None for all.
        """
        params = self._params
        scores = _penalised(logits, params, prompt, output)
        if len(output) < params.min_tokens:
            scores[[*self._eos, *params.stop_token_ids]] = MASKED
        if mask is not None:
            scores[~mask] = MASKED
        if self.choices is not None:
            allowed = self.choices.allowed(self._eos, budget)
            token = int(allowed[self._pick(scores[allowed], len(prompt) + len(output))])
        else:
            token = self._pick(scores, len(prompt) + len(output))
        return Draw(token, self._logprobs(logits, token))

    def word_probabilities(self, logits: FloatArray) -> dict[str, float]:
        """Return the softmax probability of each of the request's words, which is the sum of those
        of its tokens. Like log probabilities, it heeds no other parameter.

        logits: [vocabulary] fp32.
        """
        weights = weights_of(logits, temperature=1.0)
        total = weights.sum()
        return {
            word: min(1.0, float(weights[tokens].sum() / total))
            for word, tokens in self._words.items()
        }

    def _pick(self, scores: FloatArray, position: int) -> int:
        if self._params.greedy:
            return int(scores.argmax())
        return draw(scores, self._params, self._uniforms.at(position))

    def parameters(self, position: int, width: int) -> tuple[int, float, float, float, float]:
        """Return (top-k, temperature, min-p, top-p, random number) for the token at `position`."""
        params = self._params
        temperature = max(params.temperature, MIN_FP32_TEMPERATURE)
        uniform = self._uniforms.at(position)
        return min(params.top_k, width), temperature, params.min_p, params.top_p, uniform

    def _logprobs(self, logits: FloatArray, token: int) -> tuple[TokenLogprob, ...] | None:
        count = self._params.logprobs
        if count is None:
            return None
        best = _largest(logits, count)
        alternatives = best.tolist()
        peak = float(logits.max())
        log_total = peak + math.log(np.exp(logits.astype(np.float64) - peak).sum())
        return tuple(
            TokenLogprob(
                token_id=index,
                logprob=float(logits[index]) - log_total,
                rank=1 + int((rivals > logits[index]).sum()),
                content=self._vocabulary.shown(index, self._params.skip_special_tokens),
            )
            for index in dict.fromkeys([token, *alternatives])
            # Every logit above the logit of an alternative is itself an alternative.
            for rivals in (logits[best] if index in alternatives else logits,)
        )


def draw_rows(
    logits: torch.Tensor,
    rows: Sequence[tuple[int, TokenSampler, int]],
    *,
    backend: Backend | None = None,
) -> list[int]:
    """Draw the tokens of several requests in one call, as the function `draw` does for each.

    About one draw in millions differs from `draw` by one candidate, because weights are fp32 here.

    logits: [T, vocabulary] fp32, contiguous. A logit of minus infinity is never drawn.
    rows: (row of `logits`, sampler, position of the token in its sequence) of each request. The
        samplers must be batchable and not greedy.
    """
    chosen = backend or backends.backend_of("kernels", logits.device.type)
    if chosen == "reference":
        return [
            draw(logits[row].numpy(), sampler._params, sampler._uniforms.at(position))
            for row, sampler, position in rows
        ]
    draws = [(row, *sampler.parameters(at, logits.shape[1])) for row, sampler, at in rows]
    if chosen == "gpu":
        return list(draw_placed(logits, upload(draw_parameters(draws), logits.device)).tolist())
    gemm, threads = native.kernels().gemm, torch.get_num_threads()
    return list(gemm.sample(logits.data_ptr(), logits.shape[1], draws, threads))


# Parameters of a draw on a GPU: row of the logits, top-k (below 1 for all tokens), temperature,
# min-p, top-p, and random number in [0, 1).
DrawKey = tuple[int, int, float, float, float, float]


def draw_parameters(draws: Sequence[DrawKey]) -> list[torch.Tensor]:
    """Return one tensor per parameter, each [draws], in host memory, for `draw_placed`."""
    if not draws:
        return []
    rows, top_ks, temperatures, min_ps, top_ps, uniforms = zip(*draws, strict=True)
    whole = torch.tensor([rows, [max(0, top_k) for top_k in top_ks]], dtype=torch.int32)
    single = torch.tensor([temperatures, min_ps])
    double = torch.tensor([top_ps, uniforms], dtype=torch.float64)
    return [*whole, *single, *double]


def draw_placed(logits: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the drawn tokens, [draws], for logits [rows, vocabulary] fp32 and the result of
    `draw_parameters`, both on the GPU.
    """
    tokens: torch.Tensor = on_gpu.draws().draw(logits, on_gpu.draws().Draws(*parameters))
    return tokens


def _seed(seed: int | None, request_id: str) -> int:
    if seed is not None:
        return seed % 2**64
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "little")


def _penalised(
    logits: FloatArray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> FloatArray:
    # Results stay finite, because a difference of infinities would be NaN.
    scores = logits.astype(np.float32, copy=True)
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.asarray([*prompt, *output], dtype=np.int64))
        # The image placeholder may have no embedding and no logit.
        seen = seen[seen < scores.size]
        values = scores[seen].astype(np.float64)
        penalty = np.float32(params.repetition_penalty)
        scores[seen] = _finite(np.where(values > 0, values / penalty, values * penalty))
    if output and (params.presence_penalty or params.frequency_penalty):
        tokens, counts = np.unique(np.asarray(output, dtype=np.int64), return_counts=True)
        offsets = np.float32(params.presence_penalty) + params.frequency_penalty * counts
        scores[tokens] = _finite(scores[tokens] - offsets)
    return scores


def _finite(values: DoubleArray) -> FloatArray:
    limits = np.finfo(np.float32)
    return values.clip(limits.min, limits.max).astype(np.float32)


def _largest(values: FloatArray, count: int) -> IndexArray:  # Lower indices first if equal.
    if count == 0:
        return np.empty(0, dtype=np.int64)
    candidates = np.arange(values.size)
    if count < values.size:
        candidates = _largest_ascending(values, count, np.partition(values, -count)[-count])
    return candidates[np.argsort(-values[candidates], kind="stable")]


def weights_of(scores: FloatArray, temperature: float) -> DoubleArray:
    """Return exp((scores - maximum) / temperature), [vocabulary] float64, of fp32 scores."""
    wide = torch.from_numpy(scores).double()
    weights: DoubleArray = wide.sub_(wide.max()).div_(temperature).exp_().numpy()
    return weights


def probabilities(scores: FloatArray, params: SamplingParams) -> DoubleArray:
    """Return the distribution after temperature, min-p, top-k and top-p, [vocabulary] float64. This
    reference implementation of `draw` sorts all tokens.
    """
    weights = weights_of(scores, params.temperature)
    # Whether the exponential returns subnormal numbers or zero depends on the CPU.
    weights[weights < max(params.min_p, sys.float_info.min)] = 0.0
    if 0 < params.top_k < weights.size:
        weights[weights < np.partition(weights, -params.top_k)[-params.top_k]] = 0.0
    if params.top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        mass = np.cumsum(weights[order]) / weights.sum()
        # Smallest set with a mass of top_p: tokens stay while the mass before them is smaller.
        weights[order[1:][mass[:-1] >= params.top_p]] = 0.0
    return np.asarray(weights / weights.sum())


def draw(scores: FloatArray, params: SamplingParams, uniform: float) -> int:
    """Return the token that `uniform`, in [0, 1), selects from `probabilities(scores, params)`.
    Fewer tokens are sorted, but the result is exactly the same.
    """
    weights = weights_of(scores, params.temperature)
    candidates = np.flatnonzero(weights >= max(params.min_p, sys.float_info.min))
    total = _zero_others(weights, candidates).sum()
    if 0 < params.top_k < candidates.size:
        values = weights[candidates]
        candidates = candidates[values >= np.partition(values, -params.top_k)[-params.top_k]]
        total = _zero_others(weights, candidates).sum()
    if params.top_p < 1.0:
        candidates = _nucleus(weights, candidates, total, params.top_p)
        total = _zero_others(weights, candidates).sum()
    mass = np.cumsum(weights[candidates] / total)
    index = int(np.searchsorted(mass, uniform * mass[-1], side="right"))
    return int(candidates[min(index, candidates.size - 1)])


def _nucleus(
    weights: DoubleArray, candidates: IndexArray, total: np.float64, top_p: float
) -> IndexArray:
    values = weights[candidates]
    large_values = values
    for floor in WEIGHT_FLOORS:
        above = values[values >= floor]
        if above.sum() > top_p * total * (1 + SUM_TOLERANCE):
            large_values = above
            break
    # Sum the sorted values. Of equal values, those with lower indices are taken.
    descending = np.sort(large_values)[::-1]
    last = int(np.searchsorted(np.cumsum(descending) / total, top_p, side="left"))
    if last >= descending.size:
        return candidates
    return candidates[_largest_ascending(values, last + 1, descending[last])]


def _largest_ascending(
    values: FloatArray | DoubleArray, count: int, smallest: np.floating[Any]
) -> IndexArray:
    # Of values equal to the smallest of the largest values, those with lower indices are taken.
    above = np.flatnonzero(values > smallest)
    equal = np.flatnonzero(values == smallest)
    return np.sort(np.concatenate((above, equal[: count - above.size])))


def _zero_others(weights: DoubleArray, candidates: IndexArray) -> DoubleArray:
    # The sum of the result, with its zeros, is bitwise equal to the sum in `probabilities`.
    if candidates.size == weights.size:
        return weights
    result = np.zeros_like(weights)
    result[candidates] = weights[candidates]
    return result
