"""Tests of requests before the engine: their arrival, deadline, stream, bytes and end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.fakes import Clock, FakeRegistry
from vlora.errors import Cancelled, InvalidArgument, Unavailable
from vlora.live_requests import LiveRequest, RequestTable
from vlora.request import Freshness
from vlora.server_run import RUN_VARIABLE
from vlora.serving.arrivals import ARRIVAL_INPUT, MAX_AGE_SECONDS, ArrivalStamps, shared_key
from vlora.serving.service import WaitingExporter
from vlora.serving.tensors import Array, strings


class Line:
    """A table of waiting requests, and the errors that ended them."""

    def __init__(self) -> None:
        self.clock = Clock(0.0)
        self.table = RequestTable(clock=self.clock)
        self.ended: dict[str, BaseException] = {}

    def add(self, key: str, arrival: float = 0.0, client_id: str = "", **terms: object) -> None:
        request = _Recorded(key, client_id, self.ended)
        self.table.add(request)
        self.table.wait(request, Freshness(arrival, **terms))  # type: ignore[arg-type]

    def take(self, key: str) -> bool:
        request = self.table.get(key)
        return request is not None and self.table.take(request)


class _Recorded(LiveRequest):
    def __init__(self, id: str, client_id: str, ended: dict[str, BaseException]) -> None:
        super().__init__(id, client_id)
        self._ended = ended

    def fail(self, error: BaseException) -> None:
        assert self.id not in self._ended
        self._ended[self.id] = error


def test_a_newer_request_ends_only_older_ones_of_its_stream() -> None:
    line, registry = Line(), FakeRegistry()
    exporter = WaitingExporter(registry, {"model": "m"}, line.table)
    line.add("old", 1.0, stream_id="s")
    line.add("other", 1.0, stream_id="t")
    line.add("none", 1.0)
    line.add("newest", 9.0, stream_id="s")
    line.add("of a tenant", 1.0, stream_id="s", cache_salt="alice")
    line.add("new", 2.0, stream_id="s", supersede=True)
    assert set(line.ended) == {"old"}
    assert "stream 's' superseded" in str(line.ended["old"])
    everywhere = registry["vllm:num_requests_waiting"]
    everywhere.increment(10)  # By another process.
    exporter.flush()
    assert registry["vlora:requests_before_engine"].value == 5
    assert everywhere.value == 15
    assert registry["vlora:requests_superseded_total"].value == 1
    assert registry["vlora:requests_expired_total"].value == 0
    assert not line.take("old")
    assert all(line.take(key) for key in ("other", "none", "newest", "of a tenant", "new"))
    for key in ("other", "none", "newest", "of a tenant"):
        found = line.table.get(key)
        assert found is not None
        found.moved_on = True
    exporter.flush()
    assert everywhere.value == 11


def test_a_tenant_cannot_fill_a_queue() -> None:
    table, places = RequestTable(), 10
    for tenant, own in (("alice", 5), ("bob", 3), (None, 2)):
        for index in range(own + 1 if tenant else own):
            request = LiveRequest(f"{tenant}{index}")
            table.add(request)
            if index == own:
                with pytest.raises(Unavailable, match=f"share of the queue is full: {own + 1}"):
                    table.share(request, tenant, places - len(table) + 1)
                table.remove(request)
            else:
                table.share(request, tenant, places - len(table) + 1)


def test_a_deadline_counts_from_the_arrival() -> None:
    line = Line()
    line.add("a", arrival=-0.5, deadline_ms=1000)
    line.add("b", deadline_ms=1000)
    line.add("c", deadline_ms=1500)
    line.clock.now = 0.4
    line.table.end_late()
    assert not line.ended
    line.clock.now = 0.5
    line.table.end_late()
    assert set(line.ended) == {"a"}
    line.clock.now = 1.2
    assert not line.take("b"), "it is late when it is taken"
    assert isinstance(line.ended["b"], Cancelled)
    assert line.take("c")
    assert line.table.expired == 2


def test_a_waiting_request_is_taken_or_ended_only_once() -> None:
    line = Line()
    for key in "abcd":
        line.add(key, client_id="ab" * 8 if key in "ab" else "")
    assert line.take("a")
    for _ in range(2):
        line.table.cancel_client("ab" * 8, Cancelled("x"))
        assert set(line.ended) == {"b"}
    line.table.cancel_client("", Cancelled("x"))
    assert set(line.ended) == {"b"}, "others may have the same id"
    for request in line.table:
        line.table.end_waiting(request, Cancelled("x"))
    assert sorted(line.ended) == ["b", "c", "d"]
    assert [request.id for request in line.table] == ["a"]


def test_a_request_that_is_cancelled_while_it_is_read_does_not_begin_to_wait() -> None:
    table, reason = RequestTable(), Cancelled("x")
    request = LiveRequest("a", "ab" * 8)
    table.admit(request)
    assert not table.cancel(request, reason), "its owner ends it"
    with pytest.raises(Cancelled) as raised:
        table.wait(request, Freshness(0.0))
    assert raised.value is reason


def test_a_pinned_request_keeps_its_bytes_after_its_end() -> None:
    table, request = RequestTable(max_bytes=10), LiveRequest("a")
    table.add(request)
    table.resize(request, 7)
    table.wait(request, Freshness(0.0), pinned=True)
    table.end(request, Cancelled("x"))
    assert table.bytes == 7
    table.remove(request)
    assert (table.bytes, len(table)) == (0, 0)


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


def test_models_stamp_only_under_a_server_with_a_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RUN_VARIABLE, raising=False)
    assert not ArrivalStamps.of_this_server().make(42.5)[0]
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path))
    assert ArrivalStamps.of_this_server().make(42.5)[0]


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
