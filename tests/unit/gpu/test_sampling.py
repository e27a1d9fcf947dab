"""Tests of the GPU kernels that draw tokens, interpreted, against the CPU's draws."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from tests.support import sampling as definition
from tests.support.gpu_kernels import ON_GPU
from vlora.model import sampler
from vlora.sampling import SamplingParams

FILTERS: list[dict[str, float]] = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"min_p": 0.05},
    {"top_k": 300, "top_p": 0.7, "min_p": 0.001},
    {"temperature": 0.1, "top_p": 0.99},
    {"temperature": 50.0, "top_p": 0.8},
    {"temperature": 50.0, "top_k": 200},
    {"top_k": 100_000},
]


def _parameters(
    draws: ModuleType, rows: list[int], filters: list[dict[str, float]], uniforms: list[float]
) -> object:
    """Return the parameters of the draws; row i has `filters[i]` and `uniforms[i]`."""

    def column(key: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([keys.get(key, default) for keys in filters], dtype=dtype)

    return draws.Draws(
        rows=torch.tensor(rows, dtype=torch.int32),
        top_ks=column("top_k", 0, torch.int32),
        temperatures=column("temperature", 1.0, torch.float32),
        min_ps=column("min_p", 0.0, torch.float32),
        top_ps=column("top_p", 1.0, torch.float64),
        uniforms=torch.tensor(uniforms, dtype=torch.float64),
    )


@pytest.mark.parametrize(("width", "scale"), [(1, 1.0), (37, 2.0), (512, 3.0), (1001, 4.0)])
def test_draws_equal_those_of_the_cpu(
    draws: ModuleType, monkeypatch: pytest.MonkeyPatch, width: int, scale: float
) -> None:
    # A row has several chunks and blocks, but few enough for the slow interpreter.
    monkeypatch.setattr(draws, "CHUNK", 256)
    monkeypatch.setattr(draws, "BLOCK", 512)
    logits = scale * torch.randn(5, width)
    uniforms = np.random.default_rng(width).random(len(FILTERS)).tolist()
    rows = [i % 5 for i in range(len(FILTERS))]
    drawn = draws.draw(logits, _parameters(draws, rows, FILTERS, uniforms)).tolist()
    for token, row, keys, uniform in zip(drawn, rows, FILTERS, uniforms, strict=True):
        params = SamplingParams(**{"temperature": 1.0, **keys})  # type: ignore[arg-type]
        expected = sampler.draw(logits[row].cpu().numpy(), params, uniform)
        assert token == expected, (keys, uniform)


@pytest.mark.parametrize("keys", [{"top_k": 40, "top_p": 0.9}, {"top_p": 0.8}, {}])
@pytest.mark.parametrize("width", [7001, 152_064])
def test_draws_from_a_large_vocabulary_equal_the_cpus(
    draws: ModuleType, width: int, keys: dict[str, float]
) -> None:
    """Use the chunks and blocks of a GPU; the last chunk is not full. 152,064 is Qwen2-VL's."""
    logits = 3 * torch.randn(2, width)
    params = SamplingParams(**{"temperature": 1.0, **keys})  # type: ignore[arg-type]
    for rows, uniforms in (([1, 0], [0.3, 0.999]), ([1], [0.6])):
        parameters = _parameters(draws, rows, [keys] * len(rows), uniforms)
        for token, row, uniform in zip(
            draws.draw(logits, parameters).tolist(), rows, uniforms, strict=True
        ):
            assert token == sampler.draw(logits[row].cpu().numpy(), params, uniform)


@pytest.mark.parametrize("keys", [{"top_k": 3}, {"top_p": 0.55}, {"top_p": 0.5, "top_k": 5}, {}])
def test_equal_logits_are_kept_as_on_the_cpu(draws: ModuleType, keys: dict[str, float]) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 2.0, 1.0, -torch.inf]])
    uniforms = [0.0, 0.26, 0.51, 0.999999]
    params = SamplingParams(**{"temperature": 1.0, **keys})  # type: ignore[arg-type]
    parameters = _parameters(draws, [0] * 4, [keys] * 4, uniforms)
    expected = [sampler.draw(logits[0].cpu().numpy(), params, uniform) for uniform in uniforms]
    assert draws.draw(logits, parameters).tolist() == expected


def test_a_token_of_minus_infinity_is_never_drawn(draws: ModuleType) -> None:
    logits = torch.full((1, 5000), -torch.inf)
    logits[0, [7, 4500]] = torch.tensor([1.0, 1.0])
    parameters = _parameters(
        draws, [0] * 3, [{}, {"top_k": 4}, {"top_p": 0.999}], [0.2, 0.7, 0.999]
    )
    assert draws.draw(logits, parameters).tolist() == [7, 4500, 4500]
    assert draws.draw(logits, _parameters(draws, [], [], [])).shape == (0,)


@pytest.mark.parametrize("keys", definition.FILTERS, ids=str)
def test_a_draw_is_the_quantile_of_transformers_distribution(
    draws: ModuleType, keys: dict[str, float]
) -> None:
    rows, count = definition.drawn_scores(), 800 if ON_GPU else 2
    uniforms = [sampler.Uniforms(seed).at(1) for seed in range(count)]
    numbers = [row for row in range(len(rows)) for _ in uniforms]
    parameters = _parameters(draws, numbers, [keys] * len(numbers), uniforms * len(rows))
    drawn = draws.draw(torch.tensor(np.stack(rows)), parameters).tolist()
    for row, scores in enumerate(rows):
        expected = definition.distribution(scores, SamplingParams(**keys))  # type: ignore[arg-type]
        tokens = drawn[row * count : (row + 1) * count]
        assert definition.are_quantiles(tokens, uniforms, expected).all()
        assert definition.excess_chi_squared(tokens, expected) < 5
