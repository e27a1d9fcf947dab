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


@pytest.mark.parametrize(
    ("pages", "slots", "hot_prompt", "answer", "cold_prompt"),
    [(16, 3, 2, 60, 30), (20, 8, 1, 70, 50), (24, 4, 40, 40, 70), (30, 5, 30, 70, 60)],
)
def test_newer_requests_are_held_back_until_the_oldest_has_begun(
    checkpoint: Path,
    adapters_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    pages: int,
    slots: int,
    hot_prompt: int,
    answer: int,
    cold_prompt: int,
) -> None:
    """Keep the pool full of growing requests, whose pages evict the adapter of the oldest one.

    pages: for keys and values, beside the adapter.
    """
    monkeypatch.setattr(memory, "PATIENCE_SECONDS", 2.0)
    sizes = Engine(Options(model=checkpoint, adapters=adapters_dir, block_size=4)).adapters
    run = sizes.pages_of(sizes.handle("all-r8"))
    now = 0.0
    engine = Engine(
        Options(
            model=checkpoint,
            adapters=adapters_dir,
            max_num_seqs=slots,
            block_size=4,
            adapter_pool_bytes=0,
            kv_cache_tokens=4 * (run + pages),
            max_model_len=4 * pages,
            max_wait_seconds=2.0,
            enable_prefix_caching=False,
        ),
        clock=lambda: now,
    )
    cold_text = "<s>" + "a " * cold_prompt
    cold = engine.prepare(request("cold", adapter="all-r8", prompt=cold_text, max_tokens=2))
    added, held_back_at = 0, math.inf
    for step in range(600):
        now = step * STEP
        while len(engine.scheduler.waiting) < 6:
            added += 1
            hot = request(f"hot{added}", prompt="<s>" + "a " * hot_prompt, max_tokens=answer)
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
        # Once newer requests are held back they stay so, wherever the adapter is.
        assert held_back_at == math.inf or engine.memory.arrival_cutoff < math.inf, now
    assert cold.sequence.started
