"""Tests that loads, evictions and moves of adapters do not change answers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_client import request
from tests.support.many_adapters import (
    burst,
    engine_of,
    run_in_order,
)
from vlora.adapters.tensors import WeightsReader
from vlora.engine import calibration
from vlora.errors import InvalidArgument


@pytest.mark.parametrize("host_adapters", [2, 100])
def test_a_burst_over_more_adapters_than_fit_the_pool_is_answered(
    checkpoint: Path,
    twelve: Path,
    burst_tokens: dict[str, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    host_adapters: int,
) -> None:
    adapter_bytes = 200_000
    engine = engine_of(
        checkpoint,
        twelve,
        adapter_pool_bytes=3 * adapter_bytes,
        adapter_host_bytes=host_adapters * adapter_bytes,
        kv_cache_tokens=1024,
        max_model_len=256,
    )
    readers: set[int] = set()
    read = WeightsReader.read

    def recording_read(*args: Any) -> Any:
        readers.add(threading.get_ident())
        return read(*args)

    monkeypatch.setattr(WeightsReader, "read", recording_read)
    outputs = run_in_order(engine, *burst(engine))
    assert {k: o.token_ids for k, o in outputs.items()} == burst_tokens
    assert threading.get_ident() not in readers, "a step read from disk"
    stats = engine.stats()
    assert stats.adapter_evictions > 0
    assert (stats.adapter_loads > 0) == (host_adapters == 2) == bool(readers)


def test_pinned_adapters_are_loaded_at_the_start_and_stay_through_a_burst(
    checkpoint: Path, twelve: Path, burst_tokens: dict[str, tuple[int, ...]]
) -> None:
    sizes = {"adapter_pool_bytes": 800_000, "kv_cache_tokens": 1024, "max_model_len": 256}
    names = ("a03", "a07")
    engine = engine_of(
        checkpoint, twelve, pinned_adapters=names, adapter_host_bytes=200_000, **sizes
    )

    def pinned() -> list[str]:
        loaded = engine.stats().loaded_adapters
        return [one.name for one in loaded if one.resident and one.pinned]

    packs = {handle.name: handle.run for handle in engine.adapters.pinned}
    assert sorted(pinned()) == [*names]
    outputs = run_in_order(engine, *burst(engine))
    assert {k: o.token_ids for k, o in outputs.items()} == burst_tokens
    assert {handle.name: handle.run for handle in engine.adapters.pinned} == packs
    stats = engine.stats()
    assert stats.adapter_evictions > 0
    assert stats.load_times[0] == stats.adapter_loads >= 10
    assert len(stats.loaded_adapters) >= stats.adapters_loaded == stats.adapters_resident
    known = engine.adapters.table.current.values()
    mean = sum(map(engine.adapters.tiers.pages_of, known)) / 12
    assert stats.adapters_that_fit == int((engine.pool.total - 256 / 16) / mean) >= 4
    with pytest.raises(InvalidArgument, match=r"'pinned_adapters' need \d+ pages .* Pin fewer"):
        engine_of(checkpoint, twelve, pinned_adapters=engine.adapters.names(), **sizes)


def test_calibration_does_not_write_to_adapter_pages(
    checkpoint: Path,
    twelve: Path,
    burst_tokens: dict[str, tuple[int, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibration, "cache_root", lambda: tmp_path)
    monkeypatch.setattr(calibration, "ROWS", (1, 2))
    engine = engine_of(checkpoint, twelve)
    engine.calibrate()
    engine.check_integrity()
    outputs = run_in_order(engine, *burst(engine)[:3])
    assert {k: o.token_ids for k, o in outputs.items()} == {k: burst_tokens[k] for k in outputs}


def test_kv_pages_are_moved_to_make_space_for_an_adapter(
    checkpoint: Path, twelve: Path, burst_tokens: dict[str, tuple[int, ...]]
) -> None:
    engine = engine_of(checkpoint, twelve, block_size=4, kv_cache_tokens=400, adapter_pool_bytes=0)
    outputs = run_in_order(engine, *burst(engine))
    assert {k: o.token_ids for k, o in outputs.items()} == burst_tokens
    assert engine.stats().pages_moved > 0


def test_an_adapter_that_does_not_fit_the_pool_is_refused_with_both_sizes(
    checkpoint: Path, twelve: Path
) -> None:
    engine = engine_of(checkpoint, twelve, kv_cache_tokens=64, adapter_pool_bytes=0)
    with pytest.raises(InvalidArgument, match=r"adapter 'a02' needs \d+ pages .* pool has 4"):
        engine.prepare(request("r", adapter="a02"))


def test_an_evicted_adapter_is_unmerged_but_another_one_stays_live(
    checkpoint: Path, twelve: Path
) -> None:
    engine = engine_of(checkpoint, twelve, policy="predictive")
    run_in_order(engine, *burst(engine))
    live, other, *_ = engine.adapters.resident
    engine.switcher.switch(live)
    engine._on_evict(other, engine.adapters.resident[other])
    assert engine.switcher.live == live
    engine._on_evict(live, engine.adapters.resident[live])
    assert engine.switcher.live == -1
