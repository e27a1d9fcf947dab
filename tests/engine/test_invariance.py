"""Tests that batches, chunks, pages and preemption never change a sampled answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.engine_client import answers
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.request import Request
from vlora.sampling import SamplingParams

PARAMS = (
    {"temperature": 0.9, "seed": 1},
    {"temperature": 1.5, "top_k": 20, "seed": 2},
    {"temperature": 1.0, "top_p": 0.8, "seed": 2, "repetition_penalty": 1.3},
    {"temperature": 0.7, "min_p": 0.05, "seed": 4, "frequency_penalty": 0.4, "logprobs": 2},
    {"temperature": 2.0, "seed": 5, "min_tokens": 10},
    {"temperature": 1.2, "seed": 6, "choices": ["red", "dark red", "blue"]},
)


def requests(adapters: tuple[str, ...]) -> list[Request]:
    return [
        Request(
            id=f"r{index}",
            prompt=f"<s>{'what is on the left of it ' * (index + 1)}?",
            sampling=SamplingParams.parse(
                ({"max_tokens": 20} if "choices" not in params else {}) | params
            ),
            adapter=(None, *adapters)[index % (len(adapters) + 1)],
        )
        for index, params in enumerate(PARAMS)
    ]


# With quantized activations, a difference of one bit becomes another answer, and pages of another
# size change the order of the sums.
@pytest.mark.parametrize(
    ("quantization", "block_size"), [(None, 16), ("int8-dynamic", 3), ("int4-dynamic", 3)]
)
def test_sampled_answers_do_not_depend_on_batch_chunks_or_preemption(
    checkpoint: Path, adapters_dir: Path, quantization: str | None, block_size: int
) -> None:
    torch.set_num_threads(1)
    options = Options(model=checkpoint, adapters=adapters_dir, quantization=quantization)
    large = Engine(replace(options, block_size=block_size))
    expected: dict[str, tuple[list[int], str]] = {}
    for request in requests(large.adapters.names()):
        expected |= answers(large, [request])
    small = Engine(
        replace(
            options,
            max_num_seqs=5,
            max_num_batched_tokens=11,
            block_size=3,
            kv_cache_tokens=81,
        )
    )
    assert answers(small, requests(small.adapters.names())[::-1]) == expected
    assert small.stats().preemptions > 0
    assert len({tuple(tokens) for tokens, _ in expected.values()}) == len(PARAMS)


def test_two_threads_give_the_same_answers_as_one(checkpoint: Path, adapters_dir: Path) -> None:
    engine = Engine(Options(model=checkpoint, adapters=adapters_dir))
    batch = requests(engine.adapters.names())
    expected = answers(engine, batch)
    torch.set_num_threads(2)
    try:
        assert answers(engine, batch) == expected
    finally:
        torch.set_num_threads(1)
