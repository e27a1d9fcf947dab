"""Tests that shared prefixes do not change answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.baseline_policies import MergeOnly
from tests.support.engine_client import request
from tests.support.many_adapters import (
    engine_of,
    finish,
    run_in_order,
)
from vlora.engine.engine import Engine
from vlora.engine.policies.unmerge_only import UnmergeOnly
from vlora.request import ImageFeatures

PICTURE = "<s>" + "<image>" + "what is it? " * 8


def picture(engine: Engine, seed: int) -> ImageFeatures:
    hidden = engine.config.hidden
    rows = np.random.default_rng(seed).normal(size=(40, hidden)).astype(np.float32)
    return ImageFeatures(rows, np.array([[0, 40, 1, 5, 8, 0]], np.int32))


def test_a_shared_prompt_prefix_is_not_computed_again(checkpoint: Path, twelve: Path) -> None:
    engine = engine_of(checkpoint, twelve)
    uncached = engine_of(checkpoint, twelve, enable_prefix_caching=False)

    def computed(name: str, text: str, seed: int, adapter: str | None = None) -> int:
        before = engine.stats().rows
        asked = request(name, prompt=text, images=picture(engine, seed), adapter=adapter)
        tokens = run_in_order(engine, asked)[name].token_ids
        assert tokens == run_in_order(uncached, asked)[name].token_ids
        return engine.stats().rows - before

    first = computed("a", PICTURE, 1)
    again = computed("b", PICTURE + "and why?", 1)
    assert again < first / 2
    assert engine.stats().cached_tokens >= 40
    assert computed("c", PICTURE, 2) == first, "another image"
    assert computed("d", PICTURE, 1, "a00") == first, "another adapter"
    assert computed("e", PICTURE, 1, "a00") < first / 2


def test_blocks_are_shared_while_their_owner_runs(checkpoint: Path, twelve: Path) -> None:
    engine = engine_of(checkpoint, twelve)
    text = "<s>" + "what do you see? " * 8
    engine.add(engine.prepare(request("a", prompt=text, max_tokens=20)), 0.0)
    engine.step()
    pages = engine.pool.kv
    engine.add(engine.prepare(request("b", prompt=text, max_tokens=20)), 1.0)
    outputs = engine.step()
    assert engine.pool.kv <= pages + 2
    (first,) = (output.token_ids for output in outputs if output.request_id == "b")
    expected = run_in_order(engine_of(checkpoint, twelve), request("b", prompt=text, max_tokens=20))
    assert (*first, *finish(engine)["b"].token_ids) == expected["b"].token_ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_merged_and_unmerged_weights_are_shared_in_float32_only(
    checkpoint: Path, twelve: Path, dtype: str
) -> None:
    engine = engine_of(checkpoint, twelve, dtype=dtype)
    merged = MergeOnly(8, engine.costs)
    text = "<s>" + "what do you see? " * 8
    cached = {}
    for name, policy in (
        ("unmerged", UnmergeOnly(8)),
        ("merged after unmerged", merged),
        ("merged again", merged),
        ("unmerged again", UnmergeOnly(8)),
    ):
        engine.scheduler.policy = policy
        before = engine.stats().cached_tokens
        run_in_order(engine, request(name, adapter="a01", prompt=text, max_tokens=2))
        assert (engine.switcher.live != -1) == (policy is merged)
        cached[name] = engine.stats().cached_tokens - before
    assert cached["unmerged"] == 0
    assert cached["merged again"] > 0
    assert cached["unmerged again"] > 0
    assert (cached["merged after unmerged"] > 0) == (dtype == "float32")
