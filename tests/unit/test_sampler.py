"""Tests of drawing tokens: filters equal transformers', draws depend only on seed and position."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from vlora import native
from vlora.atmm import tiles
from vlora.model.sampler import TokenSampler, Uniforms, draw, draw_rows, probabilities
from vlora.model.tokenizer import Vocabulary
from vlora.request import FloatArray
from vlora.sampling import SamplingParams

EOS = 2


def sampler(vocabulary: Vocabulary, **params: object) -> TokenSampler:
    return TokenSampler(SamplingParams.parse(params), "id", (EOS,), vocabulary)


def logits_of(seed: int, size: int = 300) -> FloatArray:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32) * 3


seeds = st.integers(0, 2**31)


def reference_draw(scores: FloatArray, params: SamplingParams, uniform: float) -> int:
    """Return the token drawn from the full distribution, sorted and summed."""
    mass = np.cumsum(distribution := probabilities(scores, params))
    token = int(np.searchsorted(mass, uniform * mass[-1], side="right"))
    return min(token, int(np.flatnonzero(distribution)[-1]))


@settings(deadline=None, max_examples=300)
@given(
    seed=seeds,
    spread=st.sampled_from([0.01, 1.0, 3.0, 30.0, 300.0]),
    ties=st.booleans(),
    masked=st.integers(0, 299),
    top_k=st.sampled_from([0, 1, 2, 7, 50, 299, 300, 400]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.95, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 1.0]),
    temperature=st.sampled_from([0.01, 0.7, 1.0, 50.0]),
    uniform=st.sampled_from([0.0, 0.3, 0.9999, 1 - 2**-53]),
)
def test_a_draw_equals_that_of_the_full_sorted_distribution_bitwise(
    seed: int,
    spread: float,
    ties: bool,
    masked: int,
    top_k: int,
    top_p: float,
    min_p: float,
    temperature: float,
    uniform: float,
) -> None:
    scores = logits_of(seed) * np.float32(spread)
    if ties:
        scores = np.round(scores)
    scores[np.random.default_rng(seed).permutation(scores.size)[:masked]] = -np.inf
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert draw(scores, params, uniform) == reference_draw(scores, params, uniform)


def test_a_draw_over_a_large_vocabulary_equals_that_of_the_full_distribution() -> None:
    for seed in range(4):
        scores = logits_of(seed, size=152_064)
        params = SamplingParams(temperature=0.8, top_k=1000 * (seed % 2), top_p=0.95)
        for uniform in (0.01, 0.5, 0.99):
            assert draw(scores, params, uniform) == reference_draw(scores, params, uniform)


def test_rows_drawn_together_equal_rows_drawn_one_by_one(vocabulary: Vocabulary) -> None:
    try:
        native.kernels()
    except ImportError as error:
        pytest.skip(str(error))
    logits = torch.randn(40, 5003) * torch.tensor([0.1, 1.0, 3.0, 30.0]).repeat(10)[:, None]
    logits[5:9] = logits[5:9].round()
    kinds = [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 1e-40},
        {"top_k": 50, "top_p": 0.95},
        {"min_p": 0.02},
        {"temperature": 50.0, "top_k": 1},
        {"top_k": 5000, "min_p": 1e-6, "top_p": 1e-9},
    ]
    samplers = [sampler(vocabulary, seed=row, **kinds[row % len(kinds)]) for row in range(40)]
    assert all(entry.batchable and not entry.greedy for entry in samplers)
    rows = [(row, samplers[row], 17 * row) for row in reversed(range(40))]
    for isa in native.kernels().runtime.isas():
        with tiles.isa(isa):
            tokens = draw_rows(logits, rows, backend="cpu")
        assert tokens == draw_rows(logits, rows, backend="reference")


@pytest.mark.parametrize(
    ("name", "values", "warper"),
    [
        ("top_k", st.integers(1, 400), TopKLogitsWarper),
        ("top_p", st.floats(0.01, 0.99), TopPLogitsWarper),
        ("min_p", st.floats(0.01, 0.99), MinPLogitsWarper),
    ],
)
@settings(deadline=None)
@given(seed=seeds, data=st.data())
def test_a_filter_equals_that_of_transformers(
    seed: int, data: st.DataObject, name: str, values: st.SearchStrategy[Any], warper: Any
) -> None:
    scores, value = logits_of(seed), data.draw(values)
    ours = probabilities(scores, SamplingParams(**{name: value}))
    theirs = warper(value)(None, torch.from_numpy(scores)[None].double()).softmax(-1)[0]
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5)


@settings(deadline=None)
@given(seed=seeds, penalty=st.floats(0.5, 3.0))
def test_repetition_penalty_equals_that_of_transformers(seed: int, penalty: float) -> None:
    scores = logits_of(seed)
    prompt, output = [5, 9, 9, 17], [9, 200]
    params = SamplingParams(temperature=0.0, repetition_penalty=penalty)
    drawn = TokenSampler(params, "id", (EOS,), None).draw(scores, prompt, output, 5)  # type: ignore[arg-type]
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([prompt + output]), torch.from_numpy(scores.copy())[None]
    )
    assert drawn.token == int(theirs.argmax())


def test_presence_and_frequency_penalties_count_output_tokens_only(vocabulary: Vocabulary) -> None:
    scores = np.zeros(300, dtype=np.float32)
    scores[[7, 8]] = [1.0, 0.9]
    present = sampler(vocabulary, temperature=0, presence_penalty=0.5)
    assert present.draw(scores, [7], [], 5).token == 7
    assert present.draw(scores, [], [7], 5).token == 8
    frequent = sampler(vocabulary, temperature=0, frequency_penalty=0.04)
    assert frequent.draw(scores, [], [7, 7], 5).token == 7
    assert frequent.draw(scores, [], [7, 7, 7], 5).token == 8


def test_a_draw_depends_only_on_seed_and_position(vocabulary: Vocabulary) -> None:
    scores = logits_of(1)
    first = sampler(vocabulary, seed=5)
    tokens = [first.draw(scores, [1] * 3, [4] * n, 50).token for n in range(40)]
    again = sampler(vocabulary, seed=5)
    backwards = [again.draw(scores, [1] * 3, [4] * n, 50).token for n in reversed(range(40))]
    assert tokens == backwards[::-1]
    assert len(set(tokens)) > 5
    other = sampler(vocabulary, seed=6)
    assert tokens != [other.draw(scores, [1] * 3, [4] * n, 50).token for n in range(40)]


def test_draws_follow_the_distribution(vocabulary: Vocabulary) -> None:
    scores = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    chosen = sampler(vocabulary, seed=11)
    counts = np.bincount([chosen.draw(scores, [], [0] * n, 9999).token for n in range(4000)])
    np.testing.assert_allclose(counts / 4000, [0.5, 0.3, 0.2], atol=0.03)


def test_end_of_text_is_masked_before_min_tokens(vocabulary: Vocabulary) -> None:
    scores = logits_of(2)
    scores[EOS] = 100.0
    chosen = sampler(vocabulary, temperature=0, min_tokens=3)
    assert chosen.draw(scores, [], [9, 9], 5).token != EOS
    assert chosen.draw(scores, [], [9, 9, 9], 5).token == EOS


@settings(deadline=None)
@given(seed=seeds, count=st.integers(0, 20), size=st.integers(1, 400), ties=st.booleans())
def test_logprobs_are_unfiltered_the_drawn_tokens_first_and_then_the_largest_in_order(
    vocabulary: Vocabulary, seed: int, count: int, size: int, ties: bool
) -> None:
    scores = logits_of(seed, size)
    if ties:
        scores = np.round(scores)
    drawn = sampler(vocabulary, temperature=5.0, top_k=50, seed=seed, logprobs=count)
    draw = drawn.draw(scores, [], [], 5)
    entries = draw.logprobs
    assert entries is not None
    expected = torch.from_numpy(scores).double().log_softmax(0)
    order = np.argsort(-scores, kind="stable")[:count].tolist()
    assert [entry.token_id for entry in entries] == list(dict.fromkeys([draw.token, *order]))
    for entry in entries:
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-6)
        assert entry.rank == int((scores > scores[entry.token_id]).sum()) + 1


def test_the_logprob_of_the_sampled_token_alone_sorts_nothing(vocabulary: Vocabulary) -> None:
    """A vocabulary of 152k tokens takes longer to sort than a step may take."""
    scores = logits_of(5, size=152_064)

    def fastest(work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(7):
            started = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    sorting = fastest(lambda: np.argsort(-scores, kind="stable"))
    for count in (0, 20):
        chosen = sampler(vocabulary, temperature=0, logprobs=count)
        assert fastest(lambda: chosen.draw(scores, [], [], 5)) < sorting / 2  # noqa: B023


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 0.01])
def test_a_tiny_temperature_draws_the_largest_logit(
    vocabulary: Vocabulary, temperature: float
) -> None:
    scores = logits_of(4)
    drawn = probabilities(scores, SamplingParams(temperature=temperature))
    assert drawn[scores.argmax()] == pytest.approx(1.0)
    chosen = sampler(vocabulary, temperature=temperature, seed=3)
    assert chosen.draw(scores, [], [], 5).token == int(scores.argmax())


def test_seed_minus_one_gives_each_request_its_own_draws(vocabulary: Vocabulary) -> None:
    scores = np.zeros(300, dtype=np.float32)
    params = SamplingParams.parse({"seed": -1})
    drawn = {
        TokenSampler(params, f"request {i}", (EOS,), vocabulary).draw(scores, [], [], 5).token
        for i in range(20)
    }
    assert len(drawn) > 10


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [0, 0.01, 1, 100])
def test_penalties_of_huge_logits_stay_finite(vocabulary: Vocabulary, temperature: float) -> None:
    """A product with the penalty must not overflow: infinity minus infinity is NaN."""
    scores = np.array([3.4e38, -3.4e38, 1.0, 3e38, -1e38] + [0.0] * 20, dtype=np.float32)
    for penalty in (1e-3, 100.0):
        for offset in (-2.0, 2.0):
            chosen = sampler(
                vocabulary,
                temperature=temperature,
                seed=1,
                repetition_penalty=penalty,
                presence_penalty=offset,
                frequency_penalty=offset,
                logprobs=20,
            )
            drawn = chosen.draw(scores, [0, 1, 2], [3, 4, 4], 5)
            assert 0 <= drawn.token < scores.size
            assert drawn.logprobs is not None
            assert not any(np.isnan(entry.logprob) for entry in drawn.logprobs)


@given(
    seed=st.integers(0, 2**64 - 1),
    runs=st.lists(st.tuples(st.integers(0, 2**32), st.integers(1, 40)), max_size=5),
)
def test_a_uniform_number_depends_on_seed_and_position_alone(
    seed: int, runs: list[tuple[int, int]]
) -> None:
    """Read runs of consecutive positions, and compare each number with a new generator's."""
    uniforms = Uniforms(seed)
    for start, count in runs:
        for position in range(start, start + count):
            philox = np.random.Philox(key=seed, counter=[position, 0, 0, 0])
            assert uniforms.at(position) == np.random.Generator(philox).random()


def test_consecutive_draws_of_a_request_share_a_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    philox = np.random.Philox

    def counted(**arguments: object) -> np.random.Philox:
        made.append(arguments)
        return philox(**arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(np.random, "Philox", counted)
    sampler = TokenSampler(SamplingParams(seed=1), "id", (EOS,), None)  # type: ignore[arg-type]
    for length in range(50):
        sampler.draw(np.zeros(100, np.float32), [1, 2], [3] * length, budget=60)
    assert len(made) == 1
