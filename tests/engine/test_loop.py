"""Tests of the engine loop: order of outputs, cancellation, admission, shutdown, and faults."""

from __future__ import annotations

import threading
from itertools import accumulate
from typing import Any

import pytest

from tests.support.engine_client import (
    ENDLESS_TOKENS,
    PATIENCE,
    Collector,
    endless,
    request,
)
from tests.support.polling import until
from vlora.engine.engine import Engine
from vlora.engine.loop import EngineLoop
from vlora.errors import SHUTTING_DOWN, Cancelled, Internal, InvalidArgument, Unavailable
from vlora.live_requests import MAX_IDS, PATIENCE_SECONDS, EarlyCancels, LiveRequest
from vlora.request import Output, Request, TokenLogprob, coalesce
from vlora.sampling import SamplingParams

LONG_ID = "a-client-id-of-its-own"


def test_outputs_arrive_in_order_and_end_once(loop: EngineLoop) -> None:
    sink = Collector()
    for index, adapter in enumerate([None, *loop.adapters.names()] * 2):
        loop.submit(request(f"r{index}", adapter=adapter), sink)
        sink.last(f"r{index}")
    for outputs in sink.outputs.values():
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        totals = list(accumulate(len(output.token_ids) for output in outputs))
        assert [output.num_output_tokens for output in outputs] == totals
        assert totals[-1] == 4
        assert outputs[-1].finish_reason == "length"
        timings = outputs[-1].timings
        assert 0 <= timings.queued <= timings.first_token <= timings.total


def test_pinned_adapters_may_take_the_pages_of_the_last_request(
    loop: EngineLoop, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle_at: list[bool] = []
    apply = engine.adapters.apply
    monkeypatch.setattr(engine.adapters, "apply", lambda: (idle_at.append(engine.idle), apply()))
    sink = Collector()
    loop.submit(request("r"), sink)
    sink.last("r")
    until(lambda: idle_at[-1:] == [True])


def test_outputs_that_accumulate_while_a_sink_is_busy_are_merged(loop: EngineLoop) -> None:
    """Merging keeps the answers of a busy server from falling behind its engine (decision 55)."""
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1)
    fast, slow = Collector(), Collector()
    loop.submit(request("r", sampling=sampling), fast)
    unmerged = fast.last("r")
    proceed = threading.Event()

    def sink(output: Output) -> None:
        slow(output)
        assert proceed.wait(PATIENCE)

    loop.submit(request("r", sampling=sampling), sink)
    until(lambda: loop.stats().finished == 2)
    # A request is counted as finished before its last output is sent. When a later request has
    # been counted, the last output of "r" has been sent.
    loop.submit(request("s", sampling=SamplingParams(max_tokens=1)), Collector())
    until(lambda: loop.stats().finished == 3)
    proceed.set()
    last = slow.last("r")
    first, rest = slow.outputs["r"]
    assert rest is last
    assert slow.tokens("r") == fast.tokens("r")
    assert last.num_output_tokens == unmerged.num_output_tokens == 40
    for merged, single in zip(_logprobs(slow), _logprobs(fast), strict=True):
        assert [entry.token_id for entry in merged] == [entry.token_id for entry in single]
    assert first.text + rest.text == "".join(output.text for output in fast.outputs["r"])


def _logprobs(sink: Collector) -> list[tuple[TokenLogprob, ...]]:
    return [token for output in sink.outputs["r"] for token in output.logprobs or ()]


def test_coalesced_outputs_keep_each_requests_order_and_end_with_its_error() -> None:
    outputs = [
        Output("a", text="1", token_ids=(1,)),
        Output("b", text="x", token_ids=(7,)),
        Output("a", text="2", token_ids=(2,)),
        Output("b", error=Cancelled("gone")),
        Output("a", token_ids=(3,), finish_reason="stop"),
    ]
    a, b, failed = coalesce(outputs)
    assert (a.text, a.token_ids, a.finish_reason) == ("12", (1, 2, 3), "stop")
    assert (b, failed) == (outputs[1], outputs[3])


def test_a_stopped_request_ends_with_cancelled(loop: EngineLoop) -> None:
    sink = Collector()
    loop.submit(endless("one", client_id=LONG_ID), sink)
    loop.submit(request("other", client_id="other-client-of-its-own"), sink)
    sink.wait(lambda: len(sink.outputs["one"]) > 2)
    loop.stop_client(LONG_ID)
    last = sink.last("one")
    assert isinstance(last.error, Cancelled)
    assert last.finish_reason is None
    assert sink.last("other").error is None
    loop.stop_client(LONG_ID)
    loop.submit(request("two", client_id=LONG_ID), sink)
    assert sink.last("two").error is None


def test_a_cancellation_that_arrives_before_its_request_ends_it(loop: EngineLoop) -> None:
    """The images of an ensemble's request may still be in the encoder."""
    sink = Collector()
    loop.stop_client(LONG_ID)
    with pytest.raises(Cancelled, match="was cancelled"):
        loop.submit(request("one", client_id=LONG_ID), sink)
    loop.submit(request("two", client_id=LONG_ID), sink)
    assert sink.last("two").error is None


def test_a_pending_cancellation_expires_and_is_bounded_in_number() -> None:
    now = [0.0]
    cancels = EarlyCancels(clock=lambda: now[0])
    cancels.add("a")
    now[0] = PATIENCE_SECONDS + 1
    assert not cancels.take("a")
    for index in range(2 * MAX_IDS):
        cancels.add(f"w{index}")
        cancels.ended(f"e{index}")
    assert not cancels.take("w0")
    assert cancels.take(f"w{2 * MAX_IDS - 1}")
    cancels.add(f"e{2 * MAX_IDS - 1}")
    assert not cancels.take(f"e{2 * MAX_IDS - 1}")


def test_a_second_live_request_with_a_stoppable_id_is_refused(loop: EngineLoop) -> None:
    sink = Collector()
    loop.submit(endless("one", client_id=LONG_ID), sink)
    with pytest.raises(InvalidArgument, match="in use by another request"):
        loop.submit(request("two", client_id=LONG_ID), sink)
    loop.submit(endless("three", client_id="7"), sink)
    loop.submit(endless("four", client_id="7"), sink)


def test_a_short_id_cannot_be_stopped(loop: EngineLoop) -> None:
    with pytest.raises(
        InvalidArgument, match=r"'cancel' = '7' is too short; .* at least 16 characters"
    ):
        loop.stop_client("7")


def test_an_aborted_request_ends_and_an_unknown_one_is_no_error(loop: EngineLoop) -> None:
    sink = Collector()
    loop.submit(endless("one"), sink)
    loop.abort("never seen")
    loop.abort("one")
    assert isinstance(sink.last("one").error, Cancelled)


def test_a_full_queue_refuses_with_its_length_before_any_work_is_done(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests being prepared count toward the limit, and withdrawn ones do not."""
    loop = EngineLoop(engine, max_waiting=2)
    one = LiveRequest("one")
    loop.admit(one)
    loop.admit(LiveRequest("two"))
    monkeypatch.setattr(engine, "prepare", lambda _: pytest.fail("prepared although refused"))
    with pytest.raises(Unavailable, match="the queue is full: 2 requests are waiting"):
        loop.admit(LiveRequest("three"))
    with pytest.raises(Unavailable, match="2 requests are waiting"):
        loop.submit(request("three"), Collector())
    monkeypatch.undo()
    loop.table.remove(one)
    sink = Collector()
    loop.submit(request("three"), sink)
    assert sink.last("three").finish_reason == "length"
    loop.submit(request("two"), sink)
    assert sink.last("two").finish_reason == "length"
    for _ in range(3):
        with pytest.raises(InvalidArgument, match="prompt is empty"):
            loop.submit(request("x", prompt=""), sink)
    loop.shutdown(drain_seconds=0.0)


def test_the_queue_holds_its_limit_while_other_requests_run(engine: Engine) -> None:
    loop = EngineLoop(engine, max_waiting=2)
    sink = Collector()
    refusals = []
    for index in range(20):
        try:
            loop.submit(endless(f"r{index}"), sink)
        except Unavailable as error:
            refusals.append(str(error))
    # Two requests may wait. Up to four more are accepted if a step takes waiting ones meanwhile.
    assert 14 <= len(refusals) <= 18
    assert all("2 requests are waiting" in refusal for refusal in refusals)
    loop.shutdown(drain_seconds=0.0)


def test_a_tenant_has_as_many_waiting_requests_as_it_leaves_places(loop: EngineLoop) -> None:
    """Running requests do not count; those that the engine does not have yet do."""
    sink = Collector()

    def admit(name: str, tenant: str | None, submit: bool = True) -> None:
        entry = LiveRequest(name)
        loop.admit(entry)
        try:
            loop.share(entry, tenant)
        except Unavailable:
            loop.table.remove(entry)
            raise
        if submit:
            keys = SamplingParams(max_tokens=ENDLESS_TOKENS, ignore_eos=True, cache_salt=tenant)
            loop.submit(request(name, sampling=keys), sink)

    for index in range(4):
        admit(f"running{index}", "alice")
        until(lambda number=index: loop.stats().running > number)
    admit("first", "alice")
    admit("second", "alice")
    until(lambda: loop.stats().waiting == 2)
    admit("third", "alice", submit=False)
    with pytest.raises(Unavailable, match="the tenant's share of the queue is full: 4 requests"):
        admit("fourth", "alice")
    for index in range(2):
        admit(f"bob{index}", "bob")
    admit("nobody", None)
    with pytest.raises(Unavailable, match="the queue is full: 6 requests are waiting"):
        admit("another", None)
    loop.table.remove(next(one for one in loop.table if one.id == "third"))


@pytest.mark.parametrize("stopped", [False, True])
def test_a_request_that_is_being_prepared_can_be_cancelled(
    loop: EngineLoop, engine: Engine, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    loop.admit(LiveRequest("one", LONG_ID))
    with pytest.raises(InvalidArgument, match="in use by another request"):
        loop.admit(LiveRequest("another", LONG_ID))
    if stopped:
        loop.stop_client(LONG_ID)
    else:
        loop.abort("one")
    sink = Collector()
    monkeypatch.setattr(engine, "prepare", lambda _: pytest.fail("prepared although refused"))
    with pytest.raises(
        Cancelled, match=r"own. was cancelled" if stopped else "request was cancelled"
    ):
        loop.submit(request("one", client_id=LONG_ID), sink)
    assert not sink.outputs
    loop.admit(LiveRequest("one", LONG_ID))
    loop.table.remove(next(iter(loop.table)))


def test_shutdown_waits_for_requests_being_prepared(engine: Engine) -> None:
    loop = EngineLoop(engine, max_waiting=6)
    sink = Collector()
    loop.admit(LiveRequest("one"))
    closing = threading.Thread(target=loop.shutdown, args=(PATIENCE,))
    closing.start()
    with loop._wake:
        assert loop._wake.wait_for(lambda: not loop._accepting, PATIENCE)
    with pytest.raises(Unavailable, match="shutting down"):
        loop.admit(LiveRequest("late"))
    loop.submit(request("one"), sink)
    closing.join()
    assert sink.last("one").finish_reason == "length"


def test_shutdown_lets_live_requests_finish(engine: Engine) -> None:
    loop = EngineLoop(engine, max_waiting=6)
    sink = Collector()
    for index in range(5):
        loop.submit(request(f"r{index}", max_tokens=30), sink)
    loop.shutdown(drain_seconds=PATIENCE)
    for index in range(5):
        assert sink.last(f"r{index}").finish_reason == "length"
    with pytest.raises(Unavailable, match="shutting down"):
        loop.submit(request("late"), sink)


def test_a_shutdown_that_hands_over_refuses_what_has_not_begun(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed, forward = threading.Semaphore(0), engine._runner.forward

    def wait_and_forward(*args: Any, **kwargs: Any) -> Any:
        assert allowed.acquire(timeout=PATIENCE)
        return forward(*args, **kwargs)

    # Nothing may end before the shutdown, however late this thread runs.
    monkeypatch.setattr(engine._runner, "forward", wait_and_forward)
    loop = EngineLoop(engine, max_waiting=6)
    sink = Collector()
    for index in range(9):
        loop.submit(request(f"r{index}", max_tokens=40), sink)
        if index < 4:  # As many as run together.
            allowed.release(2)  # The first one may have been composed before the request came.
            until(lambda name=f"r{index}": sink.outputs.get(name))
    loop.admit(LiveRequest("reading"))
    closing = threading.Thread(target=loop.shutdown, args=(PATIENCE, True))
    closing.start()
    until(lambda: loop._hands_over)
    allowed.release(1000)
    with pytest.raises(Unavailable, match="the server is shutting down"):
        loop.submit(request("reading"), sink)
    closing.join()
    errors = [sink.last(f"r{index}").error for index in range(9)]
    assert errors[:4] == [None] * 4
    assert {str(error) for error in errors[4:]} == {SHUTTING_DOWN}
    assert all(isinstance(error, Unavailable) for error in errors[4:])


def test_shutdown_without_drain_time_cancels_the_remaining_requests(engine: Engine) -> None:
    loop = EngineLoop(engine, max_waiting=6)
    sink = Collector()
    for index in range(6):
        loop.submit(endless(f"r{index}"), sink)
    loop.shutdown(drain_seconds=0.0)
    for index in range(6):
        assert isinstance(sink.last(f"r{index}").error, Cancelled)
    engine.check_integrity()
    assert engine.idle


def test_a_fault_in_a_step_ends_its_requests_but_not_the_loop(
    loop: EngineLoop, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Collector()
    forward = engine._runner.forward

    def fail(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(engine._runner, "forward", forward)
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(engine._runner, "forward", fail)
    loop.submit(request("unlucky"), sink)
    last = sink.last("unlucky")
    assert isinstance(last.error, Internal)
    assert "a fault of ours" not in str(last.error)
    loop.submit(request("next"), sink)
    assert sink.last("next").finish_reason == "length"


def test_a_sink_that_fails_ends_its_own_request_only(loop: EngineLoop) -> None:
    sink, calls = Collector(), Collector()

    def broken(output: Output) -> None:
        calls(output)
        raise RuntimeError("the client went away")

    loop.submit(endless("broken"), broken)
    loop.submit(request("healthy"), sink)
    assert sink.last("healthy").finish_reason == "length"
    assert isinstance(calls.last("broken").error, Cancelled)


def test_statistics_count_steps_tokens_and_requests(loop: EngineLoop) -> None:
    sink = Collector()
    for index in range(3):
        loop.submit(request(f"r{index}", max_tokens=5), sink)
    for index in range(3):
        sink.last(f"r{index}")
    stats = loop.stats()
    assert stats.finished == 3
    assert stats.generated_tokens == 15
    assert stats.decode_rows == 12
    assert 4 <= stats.decode_steps <= 12
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


def streamed(request_id: str, stream: str | None = "camera", **keys: Any) -> Request:
    keys |= {"temperature": 0, "max_tokens": ENDLESS_TOKENS, "ignore_eos": True}
    return request(request_id, sampling=SamplingParams.parse(keys | {"stream_id": stream}))


def test_a_superseding_request_ends_the_waiting_ones_of_its_stream(loop: EngineLoop) -> None:
    sink = Collector()
    for index in range(4):  # As many as can run together.
        loop.submit(streamed(f"runs{index}"), sink)
        sink.wait(lambda index=index: bool(sink.outputs[f"runs{index}"]))  # type: ignore[misc]
    loop.submit(streamed("old"), sink)
    loop.submit(streamed("of another stream", stream="door"), sink)
    loop.submit(streamed("keeps the others"), sink)
    loop.submit(streamed("new", supersede=True), sink)
    for name in ("old", "keeps the others"):
        last = sink.last(name)
        assert isinstance(last.error, Cancelled)
        assert "superseded" in str(last.error)
    assert loop.stats().superseded == 2
    ended = {name for name, outputs in sink.outputs.items() if outputs and outputs[-1].finished}
    assert ended == {"old", "keeps the others"}, "only waiting ones of the stream"


def test_a_request_past_its_deadline_ends_with_cancelled(engine: Engine) -> None:
    now = [100.0]
    engine._clock = lambda: now[0]
    states = [engine.prepare(streamed(name, deadline_ms=250)) for name in ("runs", "waits")]
    engine.add(states[0], arrival=100.0)
    engine.step()
    engine.add(states[1], arrival=100.1)
    now[0] = 100.25
    outputs = engine.step()
    assert [(o.request_id, type(o.error)) for o in outputs if o.finished] == [("runs", Cancelled)]
    assert "'deadline_ms' = 250" in str(outputs[0].error)
    now[0] = 100.4
    assert [o.request_id for o in engine.step() if o.error] == ["waits"]
    assert (engine.stats().expired, engine.idle) == (2, True)
