"""Tests of requests that wait before the engine: deadlines, streams, exactly one end for each."""

from __future__ import annotations

from tests.support.fakes import Clock, FakeRegistry
from vlora.errors import Cancelled
from vlora.request import Freshness
from vlora.serving.requests import WaitingExporter, WaitingRequests


class Line:
    """Waiting requests, and the errors that ended them."""

    def __init__(self) -> None:
        self.clock = Clock(0.0)
        self.waiting = WaitingRequests(self.clock)
        self.ended: dict[str, Exception] = {}

    def add(self, key: str, arrival: float = 0.0, client_id: str = "", **terms: object) -> None:
        def end(error: Exception) -> None:
            assert key not in self.ended
            self.ended[key] = error

        self.waiting.add(key, Freshness(arrival, **terms), end, client_id)  # type: ignore[arg-type]


def test_a_newer_request_ends_only_older_ones_of_its_stream() -> None:
    line = Line()
    line.add("old", 1.0, stream_id="s")
    line.add("other", 1.0, stream_id="t")
    line.add("none", 1.0)
    line.add("newest", 9.0, stream_id="s")
    line.add("new", 2.0, stream_id="s", supersede=True)
    assert set(line.ended) == {"old"}
    assert "stream 's' superseded" in str(line.ended["old"])
    assert line.waiting.superseded == 1
    assert not line.waiting.take("old")
    assert all(line.waiting.take(key) for key in ("other", "none", "newest", "new"))


def test_a_deadline_counts_from_the_arrival() -> None:
    line = Line()
    line.add("a", arrival=-0.5, deadline_ms=1000)
    line.add("b", deadline_ms=1000)
    line.add("c", deadline_ms=1500)
    line.clock.now = 0.4
    line.waiting.end_late()
    assert not line.ended
    line.clock.now = 0.5
    line.waiting.end_late()
    assert set(line.ended) == {"a"}
    line.clock.now = 1.2
    assert not line.waiting.take("b"), "it is late when it is taken"
    assert isinstance(line.ended["b"], Cancelled)
    assert line.waiting.take("c")
    assert line.waiting.expired == 2


def test_a_waiting_request_is_taken_or_ended_only_once() -> None:
    line = Line()
    for key in "abcd":
        line.add(key, client_id="ab" * 8 if key in "ab" else "")
    assert line.waiting.take("a")
    assert line.waiting.end_client("ab" * 8, Cancelled("x")) == ["b"]
    assert line.waiting.end_client("ab" * 8, Cancelled("x")) == []
    assert line.waiting.end_client("", Cancelled("x")) == [], "others may have the same id"
    assert line.waiting.end("c", Cancelled("x"))
    line.waiting.end_all(Cancelled("x"))
    assert sorted(line.ended) == ["b", "c", "d"]
    assert not len(line.waiting)


def test_the_exporter_writes_the_length_and_the_totals() -> None:
    line, registry = Line(), FakeRegistry()
    exporter = WaitingExporter(registry, {"model": "m"}, line.waiting)
    line.add("a", stream_id="s")
    line.add("b", 1.0, stream_id="s", supersede=True)
    exporter.flush()
    assert registry["vlora:requests_before_engine"].value == 1
    assert registry["vlora:requests_superseded_total"].value == 1
    assert registry["vlora:requests_expired_total"].value == 0
