"""Tests of the stamps with which a server's models pass on the arrival time of a request."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.fakes import Clock
from vlora.errors import InvalidArgument
from vlora.serving.arrivals import ARRIVAL_INPUT, MAX_AGE_SECONDS, ArrivalStamps, shared_key
from vlora.serving.tensors import Array, strings


def read(stamps: ArrivalStamps, stamp: Array) -> float:
    return stamps.read({ARRIVAL_INPUT: stamp})


def test_another_model_of_the_server_reads_the_arrival(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        (key,) = set(pool.map(shared_key, [tmp_path] * 32))
    clock = Clock(100.0)
    encoder, engine = ArrivalStamps(key, clock), ArrivalStamps(shared_key(tmp_path), clock)
    assert engine.read({}) == 100.0
    assert read(engine, encoder.make(42.5)) == 42.5
    assert [path.name for path in tmp_path.iterdir()] == ["arrival.key"]
    assert (tmp_path / "arrival.key").stat().st_mode & 0o077 == 0


def test_a_stamp_that_was_not_made_by_the_server_is_refused() -> None:
    clock = Clock(100.0)
    stamps, other = ArrivalStamps(b"k" * 32, clock), ArrivalStamps(b"o" * 32, clock)
    genuine = bytes(stamps.make(42.5)[0])
    changed = bytes([genuine[0] ^ 1]) + genuine[1:]
    for stamp in (changed, genuine[:-1], b"x", bytes(other.make(42.5)[0]), b"\xff" * 100):
        with pytest.raises(InvalidArgument, match="'arrival_stamp'"):
            read(stamps, strings([stamp]))


def test_a_stamp_counts_once_and_only_for_a_while() -> None:
    """A client can get stamps from `vision_encoder`, but gains nothing by keeping them."""
    clock = Clock(100.0)
    stamps = ArrivalStamps(b"k" * 32, clock)
    first, kept = stamps.make(42.5), stamps.make(42.5)
    assert [read(stamps, first), read(stamps, first)] == [42.5, 100.0]
    clock.now += MAX_AGE_SECONDS + 1
    assert [read(stamps, kept), read(stamps, first)] == [clock.now, clock.now]
    read(stamps, stamps.make(0.0))
    assert len(stamps._used) == 1


def test_without_a_key_the_arrival_is_that_at_each_model() -> None:
    clock = Clock(100.0)
    stamps = ArrivalStamps(b"", clock)
    assert read(stamps, stamps.make(42.5)) == 100.0
    with pytest.raises(InvalidArgument):
        read(stamps, strings([b"x" * 56]))
