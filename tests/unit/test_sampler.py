"""Tests of drawing tokens: filters equal transformers', draws depend only on seed and position."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sampling import (
    FILTERS,
    SIZE,
    are_quantiles,
    distribution,
    drawn_scores,
    excess_chi_squared,
    processed,
)
from vlora import native
from vlora.atmm import tiles
from vlora.model import sampler as sampler_module
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


def skip_without_kernels() -> None:
    try:
        native.kernels()
    except ImportError as error:
        pytest.skip(str(error))


def test_rows_drawn_together_equal_rows_drawn_one_by_one(vocabulary: Vocabulary) -> None:
    skip_without_kernels()
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


def scores_drawn_from(
    sampler: TokenSampler, logits: FloatArray, *args: Any, **named: Any
) -> FloatArray:
    """Return the scores from which a sampler that is not greedy draws."""
    with mock.patch.object(sampler_module, "draw", return_value=0) as drawn:
        sampler.draw(logits, *args, budget=99, **named)
    scores: FloatArray = drawn.call_args.args[0]
    return scores


PENALTIES: list[dict[str, Any]] = [
    *({"repetition_penalty": value} for value in (1e-3, 0.5, 1.3, 100.0)),
    *({"presence_penalty": value} for value in (-2.0, 0.7, 2.0)),
    *({"frequency_penalty": value} for value in (-2.0, 0.4, 2.0)),
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.3},
    *({"min_tokens": value, "stop_token_ids": (0, 9)} for value in (1, 3, 4, 5)),
    {"min_tokens": 4, "ignore_eos": True, "repetition_penalty": 0.8},
]


@pytest.mark.parametrize("keys", PENALTIES, ids=str)
@pytest.mark.parametrize("eos", [0, 2])
@pytest.mark.parametrize(
    ("prompt", "output"),
    [
        ([5, 9, 9, 17], [9, 20, 20, 31]),
        ([5, 0, 0], [0, 0, 5]),
        ([1, 2], []),
        ([SIZE, *range(SIZE)], [3] * 5),
    ],
)
def test_penalised_and_banned_scores_equal_those_of_transformers(
    keys: dict[str, Any], eos: int, prompt: list[int], output: list[int]
) -> None:
    params = SamplingParams(**keys)
    chosen = TokenSampler(params, "id", (eos,), None)  # type: ignore[arg-type]
    assert not chosen.batchable
    assert chosen.ends == {*params.stop_token_ids, *([] if params.ignore_eos else [eos])}
    allowed = np.random.default_rng(1).random(SIZE) < 0.7
    for logits in drawn_scores()[:4]:  # Those without masked tokens: logits are finite.
        for mask in (None, allowed):
            ours = scores_drawn_from(chosen, logits.copy(), prompt, output, mask=mask)
            ends = {eos, *params.stop_token_ids}
            expected = processed(logits, prompt, output, params, ends, mask)
            np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("keys", FILTERS, ids=str)
def test_the_distribution_equals_that_of_transformers(keys: dict[str, Any]) -> None:
    params = SamplingParams(**keys)
    rows = [*drawn_scores(), *(logits_of(seed) for seed in range(4))]
    for scores in [*rows, *(np.round(row) for row in rows[-4:])]:
        np.testing.assert_allclose(
            probabilities(scores, params), distribution(scores, params), rtol=1e-9, atol=1e-15
        )


Place = tuple[int, int]  # Seed and position.
BACKENDS = ["one by one", "reference", "cpu"]


def draws_of(backend: str, row: int, keys: dict[str, Any], places: list[Place]) -> list[int]:
    """Return the tokens drawn from a row of `drawn_scores` with each seed at its position."""
    if backend == "cpu":
        skip_without_kernels()
    logits = np.stack(drawn_scores())
    samplers = {
        seed: TokenSampler(SamplingParams(seed=seed, **keys), "id", (EOS,), None)  # type: ignore[arg-type]
        for seed, _ in places
    }
    if backend == "one by one":
        return [
            samplers[seed].draw(logits[row], [1], [3] * (position - 1), 9).token
            for seed, position in places
        ]
    rows = [(row, samplers[seed], position) for seed, position in places]
    return draw_rows(torch.from_numpy(logits), rows, backend=backend)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keys", FILTERS, ids=str)
def test_a_draw_is_the_quantile_of_transformers_distribution(
    backend: str, keys: dict[str, Any]
) -> None:
    places = [(seed, 1 + seed % 3) for seed in range(60)]
    uniforms = [Uniforms(seed).at(position) for seed, position in places]
    for row, scores in enumerate(drawn_scores()):
        tokens = draws_of(backend, row, keys, places)
        expected = distribution(scores, SamplingParams(**keys))
        assert are_quantiles(tokens, uniforms, expected).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keys", [{}, {"temperature": 3.0, "top_k": 12, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize(
    "places",
    [[(seed, 1) for seed in range(4000)], [(7, position) for position in range(1, 4001)]],
    ids=["seeds", "positions"],
)
def test_draws_over_seeds_and_positions_follow_transformers_distribution(
    backend: str, keys: dict[str, Any], places: list[Place]
) -> None:
    for row in (0, 2):
        tokens = draws_of(backend, row, keys, places)
        expected = distribution(drawn_scores()[row], SamplingParams(**keys))
        assert excess_chi_squared(tokens, expected) < 4


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


@settings(deadline=None)
@given(seed=seeds, count=st.integers(0, 20), size=st.integers(1, 400), ties=st.booleans())
def test_logprobs_are_unfiltered_the_drawn_tokens_first_and_then_the_largest_in_order(
    vocabulary: Vocabulary, seed: int, count: int, size: int, ties: bool
) -> None:
    scores = logits_of(seed, size)
    if ties:
        scores = np.round(scores)
    penalties = {"repetition_penalty": 2.0, "presence_penalty": 2.0}
    drawn = sampler(vocabulary, temperature=5.0, top_k=50, seed=seed, logprobs=count, **penalties)
    draw = drawn.draw(scores, [], [0], 5)
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
            started = time.process_time()
            work()
            seconds.append(time.process_time() - started)
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


@settings(deadline=None)
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
