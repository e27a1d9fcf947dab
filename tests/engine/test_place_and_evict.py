"""Tests of an adapter that gets its pages before those of its request's prompt are free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.engine_client import request
from vlora.config import Options
from vlora.engine import memory
from vlora.engine.engine import Engine

STEP = 0.1
"""Seconds of a step on the test's clock."""


@dataclass(frozen=True)
class Crowd:
    """A pool that is always full of growing requests, and a request for an adapter.

    pages: number of pages for keys and values, in addition to those of the adapter.
    slots, waiting: numbers of requests that run and that wait.
    prompt, answer: numbers of tokens of the requests without an adapter.
    cold_prompt: number of tokens of the prompt with the adapter.
    max_wait: value of `max_wait_seconds`.
    """

    pages: int
    slots: int
    prompt: int
    answer: int
    cold_prompt: int
    waiting: int = 6
    max_wait: float = 2.0


def start_of_the_cold_request(checkpoint: Path, adapters_dir: Path, crowd: Crowd) -> float:
    """Return the time at which the request with the adapter begins. Its adapter is evicted again
    and again by the growing pages of the others."""
    sizes = Engine(Options(model=checkpoint, adapters=adapters_dir, block_size=4)).adapters
    run = sizes.tiers.pages_of(sizes.handle("all-r8"))
    now = 0.0
    engine = Engine(
        Options(
            model=checkpoint,
            adapters=adapters_dir,
            max_num_seqs=crowd.slots,
            block_size=4,
            adapter_pool_bytes=0,
            kv_cache_tokens=4 * (run + crowd.pages),
            max_model_len=4 * crowd.pages,
            max_wait_seconds=crowd.max_wait,
            enable_prefix_caching=False,
        ),
        clock=lambda: now,
    )
    cold_text = "<s>" + "a " * crowd.cold_prompt
    cold = engine.prepare(request("cold", adapter="all-r8", prompt=cold_text, max_tokens=2))
    added, held_back_at = 0, math.inf
    for step in range(600):
        now = step * STEP
        while len(engine.scheduler.waiting) < crowd.waiting:
            added += 1
            hot = request(
                f"hot{added}", prompt="<s>" + "a " * crowd.prompt, max_tokens=crowd.answer
            )
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


@pytest.mark.parametrize(
    "crowd",
    [
        Crowd(16, 3, 2, 60, 30),
        Crowd(20, 8, 1, 70, 50),
        Crowd(24, 4, 40, 40, 70),
        Crowd(30, 5, 30, 70, 60),
    ],
    ids=str,
)
def test_newer_requests_are_held_back_until_the_oldest_has_begun(
    checkpoint: Path, adapters_dir: Path, crowd: Crowd
) -> None:
    start_of_the_cold_request(checkpoint, adapters_dir, crowd)


def test_holding_newer_requests_back_lets_the_oldest_begin_earlier(
    checkpoint: Path, adapters_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd = Crowd(50, 6, 19, 63, 181, waiting=12, max_wait=30.0)
    start = start_of_the_cold_request(checkpoint, adapters_dir, crowd)
    monkeypatch.setattr(memory, "PATIENCE_SECONDS", math.inf)
    assert start < 0.8 * start_of_the_cold_request(checkpoint, adapters_dir, crowd)
