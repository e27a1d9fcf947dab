"""Tests of an adapter that gets its pages before those of its request's prompt are free."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.support.engine_client import request
from vlora.config import Options
from vlora.engine import memory
from vlora.engine.engine import Engine

STEP = 0.1
"""Seconds of a step on the test's clock."""


def start_of_the_cold_request(checkpoint: Path, adapters_dir: Path) -> float:
    """Return the time at which a request with an adapter begins. Its adapter is evicted again and
    again by the growing pages of the others, of which six run and twelve wait at any time."""
    sizes = Engine(Options(model=checkpoint, adapters=adapters_dir, block_size=4)).adapters
    pages = 50  # The pages for keys and values, which are always full.
    now = 0.0
    engine = Engine(
        Options(
            model=checkpoint,
            adapters=adapters_dir,
            max_num_seqs=6,
            block_size=4,
            adapter_pool_bytes=0,
            kv_cache_tokens=4 * (sizes.tiers.pages_of(sizes.handle("all-r8")) + pages),
            max_model_len=4 * pages,
            max_wait_seconds=30.0,
            enable_prefix_caching=False,
        ),
        clock=lambda: now,
    )
    cold_text = "<s>" + "a " * 181
    cold = engine.prepare(request("cold", adapter="all-r8", prompt=cold_text, max_tokens=2))
    added, held_back_at = 0, math.inf
    for step in range(600):
        now = step * STEP
        while len(engine.scheduler.waiting) < 12:
            added += 1
            hot = request(f"hot{added}", prompt="<s>" + "a " * 19, max_tokens=63)
            engine.add(engine.prepare(hot), now)
        if step == 5:
            engine.add(cold, now)
        engine.step()
        engine.adapters.finish()
        engine.check_integrity()
        if cold.sequence.started:
            break
        if engine.memory.arrival_cutoff == cold.sequence.arrival:
            held_back_at = min(held_back_at, now)
        # Once newer requests are held back, they stay held back, wherever the adapter is.
        assert held_back_at == math.inf or engine.memory.arrival_cutoff < math.inf, now
    assert cold.sequence.started
    return now


def test_holding_newer_requests_back_lets_the_oldest_begin_earlier(
    checkpoint: Path, adapters_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = start_of_the_cold_request(checkpoint, adapters_dir)
    monkeypatch.setattr(memory, "PATIENCE_SECONDS", math.inf)
    assert start < 0.8 * start_of_the_cold_request(checkpoint, adapters_dir)
