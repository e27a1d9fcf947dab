"""Tests of the services without Triton: what they share, and then each model's own."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.fakes import TEMPLATE, FakeResponder, RustPanic, features, first
from tests.support.polling import until
from tests.support.services import (
    MAX_BYTES,
    PICTURE,
    LmmSetting,
    Setting,
    UnarySetting,
    VisionSetting,
)
from vlora.adapters.catalog import NameTable
from vlora.adapters.files import AdapterInfo
from vlora.config import Limits
from vlora.errors import (
    AdapterChanging,
    Cancelled,
    Internal,
    InvalidArgument,
    NotFound,
    Unavailable,
    VLoraError,
)
from vlora.request import OutputSink, Request
from vlora.serving import lmm as lmm_service
from vlora.serving.arrivals import ARRIVAL_INPUT
from vlora.serving.codec import prepare
from vlora.serving.lmm import LONG_PROMPT, MAX_BROKEN, STRUCTURED_THREADS, ServerDescription
from vlora.serving.lmm_unary import inner_request
from vlora.serving.tenant_pool import TenantPool
from vlora.serving.tensors import Tensors, flag, strings
from vlora.serving.vision_encoder import features_from
from vlora.vision.adapters import VisionPart
from vlora.vision.chat_template import Chat
from vlora.vision.prompts import render


@pytest.fixture(params=[LmmSetting, UnarySetting, VisionSetting])
def setting(request: pytest.FixtureRequest) -> Iterator[Setting]:
    created: Setting = request.param()
    yield created
    created.close()


def test_a_request_that_is_late_superseded_or_cancelled_ends_before_its_work(
    setting: Setting,
) -> None:
    working = setting.occupy()
    ended = [setting.wait(deadline_ms=20)]
    assert "past its deadline: 'deadline_ms' = 20" in ended[0].error.message
    ended += [setting.wait(stream_id="s")]
    newer = setting.wait(stream_id="s", supersede=True)
    ended += [setting.wait("x" * 16)]
    assert setting.cancel("x" * 16).answer == {}
    if setting.service.asks_clients:
        ended += [setting.wait()]
        ended[-1].cancelled = True
    assert all(isinstance(one.error, Cancelled) for one in ended)
    assert (setting.table.expired, setting.table.superseded) == (1, 1)
    before = setting.begun
    setting.gate.set()
    until(lambda: setting.begun == before + 1)
    assert not any(one.failure for one in (*working, newer))


def test_a_full_queue_rejects_a_request_with_its_length_before_reading_it(setting: Setting) -> None:
    working = setting.occupy()
    waiting = []
    while (refused := setting.wait()).failure is None:
        waiting.append(refused)
    assert isinstance(refused.failure, Unavailable)
    assert refused.failure.message == f"the queue is full: {setting.full} requests are waiting"
    unreadable = setting.ask(image=strings([b"x"]), sampling_parameters=np.zeros(7))
    assert unreadable.error.message == refused.failure.message
    before = setting.begun
    setting.gate.set()
    until(lambda: setting.begun == before + len(waiting))
    until(lambda: setting.wait().failure is None)
    assert not any(one.failure for one in (*working, *waiting))


def test_the_bytes_of_requests_are_limited(setting: Setting) -> None:
    assert isinstance(setting.wait(size=MAX_BYTES).error, InvalidArgument)
    setting.occupy()
    setting.wait(size=6000)
    held = setting.table.bytes
    refused = setting.wait(size=6000).error
    assert isinstance(refused, Unavailable)
    assert f"hold {held} bytes" in refused.message
    assert "the limit is 10000 ('max_in_flight_bytes')" in refused.message
    assert setting.table.bytes == held > 6000
    setting.gate.set()
    until(lambda: setting.wait(size=6000).failure is None)


def test_closing_ends_the_requests_that_wait(setting: Setting) -> None:
    setting.occupy()
    waiting = [setting.wait() for _ in range(2)]
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(setting.service.close)
        assert all(isinstance(one.error, Unavailable) for one in waiting)
        assert isinstance(setting.wait().failure, Unavailable)
        setting.gate.set()
        closing.result(30)


LONG = {"text_input": strings(["x" * (LONG_PROMPT + 1)])}


@pytest.fixture
def lmm() -> Iterator[LmmSetting]:
    created = LmmSetting()
    yield created
    created.close()


def test_an_answer_streams_and_ends_with_the_final_flag(lmm: LmmSetting) -> None:
    responder = lmm.ask(stream=flag(True))
    lmm.engine.say("a")
    lmm.engine.say("b", finish_reason="stop")
    assert responder.texts == ["a", "b"]
    assert [final for _, final in responder.sent] == [False, True]
    assert not lmm.table
    assert [output.text for output in lmm.observed] == ["a", "b"]


def test_a_request_that_fails_early_leaves_the_queue(lmm: LmmSetting) -> None:
    assert isinstance(lmm.ask(sampling={"lora_name": "unknown"}).failure, NotFound)
    assert isinstance(lmm.ask(task=strings(["fly"])).failure, InvalidArgument)
    too_many = lmm.ask(image=strings([b""] * 64), frames=strings([b""])).error
    assert "65 images and frames; the limit is 64" in too_many.message
    assert lmm.encoded == []
    assert not lmm.table


def test_an_adapter_is_chosen_only_for_requests_of_the_ensemble_that_leave_it_open() -> None:
    lmm = LmmSetting(routes=True)
    question = {"text_input": strings(["a question"])}
    ensemble = {"image_layout": np.zeros((0, 6), np.int32)}
    try:
        lmm.ask(**question, **ensemble)
        lmm.ask(**question)
        lmm.ask(**question, **ensemble, sampling={"lora_name": None})
        lmm.ask(text_input=strings(["unknown question"]), **ensemble)
        adapters = [request.adapter for request in lmm.engine.requests]
        assert adapters == ["a", None, None, None]
    finally:
        lmm.close()


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("secret"), InvalidArgument("image 0 is corrupt")]
)
def test_an_error_of_the_encoder_fails_the_request_without_internal_details(
    lmm: LmmSetting, error: Exception
) -> None:
    lmm.encode_error = error
    failure = lmm.wait().error
    if isinstance(error, VLoraError):
        assert failure is error
    else:
        assert isinstance(failure, Internal)
        assert "secret" not in failure.message


def test_an_error_of_the_engine_ends_the_request(lmm: LmmSetting) -> None:
    responder = lmm.ask(stream=flag(True))
    lmm.engine.say("a")
    lmm.engine.fail(Cancelled("stopped"))
    assert isinstance(responder.failure, Cancelled)
    assert not lmm.table


def test_images_are_encoded_on_another_thread_before_the_request_is_submitted(
    lmm: LmmSetting,
) -> None:
    lmm.ask(image=strings([PICTURE]), task=strings(["vqa"]))
    stream = {"stream_id": "s", "supersede": True}
    lmm.ask(image=strings([PICTURE]), sampling={"max_tokens": 3, **stream})
    until(lambda: len(lmm.engine.requests) == 2)
    request = lmm.engine.requests[0]
    plain, terms = lmm.encoded
    assert set(plain) == {"text_input", "image", ARRIVAL_INPUT}
    # The encoder and the engine count from the same arrival.
    assert lmm.stamps.read(plain) == request.arrival
    assert request.prompt.count("<image>") == 1
    assert request.images is not None
    assert json.loads(terms["sampling_parameters"][0]) == stream, "the encoder can end it as well"


def test_a_long_prompt_is_prepared_on_another_thread(lmm: LmmSetting) -> None:
    """Triton hands all requests over on one thread, and tokenizing a long prompt takes long."""
    tokenizing = threading.Event()
    submit = lmm.engine.submit

    def slow_for_long_prompts(request: Request, sink: OutputSink) -> None:
        if len(request.prompt) > LONG_PROMPT:
            tokenizing.set()
            assert lmm.gate.wait(30)
        submit(request, sink)

    lmm.engine.submit = slow_for_long_prompts  # type: ignore[method-assign]
    lmm.gate.clear()
    long = lmm.ask(**LONG)
    assert tokenizing.wait(30)
    lmm.ask()
    assert len(lmm.engine.requests) == 1
    lmm.gate.set()
    until(lambda: len(lmm.engine.requests) == 2)
    assert not lmm.encoded
    lmm.engine.say("done", finish_reason="stop")
    assert long.done.wait(30)
    assert long.texts[0].endswith("done")


def test_a_tenant_leaves_threads_for_structures_to_others(lmm: LmmSetting) -> None:
    submit, begun, free = lmm.engine.submit, [], threading.Event()

    def slow_for_alice(request: Request, sink: OutputSink) -> None:
        begun.append(request.sampling.cache_salt)
        assert request.sampling.cache_salt != "alice" or free.wait(30)
        submit(request, sink)

    lmm.engine.submit = slow_for_alice  # type: ignore[method-assign]
    lmm.engine.max_admitted = None
    for tenant in ["alice"] * (STRUCTURED_THREADS + 4) + ["bob"]:
        lmm.ask(sampling={"cache_salt": tenant, "guided_regex": "a"})
    until(lambda: "bob" in begun and len(begun) > STRUCTURED_THREADS // 2)
    assert begun.count("alice") == STRUCTURED_THREADS // 2
    free.set()
    until(lambda: len(lmm.engine.requests) == STRUCTURED_THREADS + 5)


@pytest.mark.parametrize("said", [{"messages": flag(True)}, {"task": strings(["chat"])}])
def test_a_conversation_of_more_messages_than_the_context_holds_is_not_rendered(
    lmm: LmmSetting, said: Tensors
) -> None:
    lmm.table._max_bytes = math.inf
    message = {"role": "user", "content": ""}
    # The template of this test refuses the shorter conversation itself.
    for count, reason in ((1024, "has no chat template"), (1025, "it has 1025 messages; the")):
        text = json.dumps({"messages": [message] * count})
        sent = lmm.ask(text_input=strings([text]), **said)
        assert sent.done.wait(30)
        assert isinstance(sent.failure, InvalidArgument)
        assert reason in sent.failure.message


def test_a_long_conversation_is_read_on_another_thread(
    lmm: LmmSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, parse = [], Chat.parse

    def note_thread(*given: Any) -> Chat:
        threads.append(threading.current_thread().name)
        return parse(*given)

    monkeypatch.setattr(Chat, "parse", note_thread)
    lmm.table._max_bytes = math.inf
    for length in (1, LONG_PROMPT):
        text = json.dumps({"messages": [{"role": "user", "content": "x" * length}]})
        lmm.ask(text_input=strings([text]), messages=flag(True))
    until(lambda: len(lmm.engine.requests) == 2)
    assert threads[0] == threading.current_thread().name
    assert threads[1].startswith("encode")


def test_one_long_prompt_is_rendered_at_a_time(
    lmm: LmmSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendering, most = [], []

    def slow(*given: Any) -> Any:
        rendering.append(1)
        most.append(len(rendering))
        time.sleep(0.01)
        rendering.pop()
        return prepare(*given)

    monkeypatch.setattr("vlora.serving.lmm.prepare", slow)
    lmm.engine.max_admitted = None
    lmm.table._max_bytes = math.inf
    pool = TenantPool(4, "encode")
    monkeypatch.setattr(lmm.service, "_pool", pool)
    for _ in range(8):
        lmm.ask(**LONG)
    until(lambda: len(lmm.engine.requests) == 8)
    pool.shutdown()
    assert max(most) == 1


def test_a_tenant_leaves_threads_of_a_pool_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, gate, turns = TenantPool(4, "test"), threading.Event(), []
    submit = pool._executor.submit

    def noted(run: Any, tenant: str, work: Any) -> Any:
        turns.append(tenant)
        return submit(run, tenant, work)

    monkeypatch.setattr(pool._executor, "submit", noted)
    for tenant in [*["alice"] * 10, *["bob"] * 3]:
        pool.submit(tenant, lambda: gate.wait(30))
    assert turns == ["alice", "alice", "bob"]
    gate.set()
    until(lambda: len(turns) == 13)
    pool.shutdown()
    assert turns.index("bob", 3) < 9, "tenants take turns"


def test_a_long_prompt_that_waits_is_cancelled(lmm: LmmSetting) -> None:
    lmm.occupy()
    long = lmm.ask("a-long-request-id", **LONG)
    lmm.cancel("a-long-request-id")
    assert isinstance(long.failure, Cancelled)
    lmm.gate.set()
    until(lambda: lmm.engine.requests)
    assert len(lmm.engine.requests) == 1


def test_a_response_that_cannot_be_sent_aborts_its_request(lmm: LmmSetting) -> None:
    responder = lmm.ask(stream=flag(True))
    responder.broken = True
    lmm.engine.say("a")
    assert lmm.engine.aborted == [lmm.engine.requests[0].id]
    assert not lmm.table


def test_a_cancel_request_is_passed_on_and_gets_an_empty_final_response(
    lmm: LmmSetting,
) -> None:
    assert lmm.cancel("x" * 16).answer == {}
    assert lmm.engine.stopped == ["x" * 16]
    until(lambda: lmm.passed_on == ["x" * 16])
    lmm.engine.refuse = InvalidArgument("too short")
    assert lmm.cancel("x" * 15).failure is lmm.engine.refuse


def test_the_description_is_sent_even_if_the_queue_is_full(lmm: LmmSetting) -> None:
    lmm.engine.max_admitted = 0
    answer = lmm.ask(describe=flag(True)).answer
    assert answer["details"].tolist() == strings(['{"tasks": []}']).tolist()


def test_the_description_is_bounded_however_many_adapters_are_broken() -> None:
    table = NameTable({}, {f"x{number:05}": InvalidArgument("?") for number in range(50_000)})
    described = json.loads(ServerDescription(lambda: table, 64).as_json())
    assert list(described["broken"]) == [f"x{number:05}" for number in range(MAX_BROKEN)]


def test_the_description_describes_only_changed_adapters_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def handle(name: str, *tasks: str) -> Any:
        info = AdapterInfo(name, "", (4,), (), tasks, {}, (), ())
        return SimpleNamespace(description=SimpleNamespace(info=info))

    made: list[str] = []
    entry = lmm_service._entry
    monkeypatch.setattr(lmm_service, "_entry", lambda *a: (made.append(a[0]), entry(*a))[1])
    tables = [NameTable({"b": handle("b"), "a": handle("a", "vqa")}, {})]
    description = ServerDescription(lambda: tables[-1], 64)
    described = json.loads(description.as_json())
    assert [one["tasks"] for one in described["adapters"]] == [["vqa"], []]
    assert made == ["a", "b"]
    tables.append(NameTable({**tables[0].current, "b": handle("b", "caption")}, {}))
    described = json.loads(description.as_json())
    assert [one["tasks"] for one in described["adapters"]] == [["vqa"], ["caption"]]
    assert made == ["a", "b", "b"]


def test_the_task_auto_is_the_one_that_an_ensemble_chooses(lmm: LmmSetting) -> None:
    for name in (None, "finder"):
        lmm.ask(task=strings(["auto"]), sampling={"lora_name": name})
    prompts = [request.prompt for request in lmm.engine.requests]
    assert prompts == [render(task, "hello", 0, 0, TEMPLATE) for task in ("vqa", "refer")]


@pytest.mark.parametrize("by_its_id", [False, True])
def test_a_request_that_is_being_encoded_ends_at_once_and_the_encoder_is_notified(
    lmm: LmmSetting, *, by_its_id: bool
) -> None:
    lmm.gate.clear()
    responder = lmm.wait("x" * 16)
    until(lambda: lmm.encoded)
    if by_its_id:
        lmm.cancel("x" * 16)
        assert lmm.engine.stopped == [], "a later request of this id is another one"
    else:
        responder.cancelled = True
    assert isinstance(responder.error, Cancelled)
    until(lambda: lmm.passed_on == ["x" * 16] * by_its_id + lmm.encoded_ids)
    lmm.gate.set()
    free = threading.Event()
    lmm.pool.submit(None, free.set)
    assert free.wait(30)
    assert lmm.engine.requests == []


def test_a_request_that_has_ended_holds_no_bytes(lmm: LmmSetting) -> None:
    lmm.wait(size=400)
    until(lambda: lmm.engine.requests)
    assert lmm.table.bytes == features(2)["image_features"].nbytes
    lmm.engine.say("a", finish_reason="stop")
    assert lmm.table.bytes == 0


@pytest.mark.parametrize("ask", [LmmSetting.ask, LmmSetting.wait])
def test_a_panic_of_a_library_fails_its_request(lmm: LmmSetting, ask: Any) -> None:
    """The request is submitted on Triton's thread, and with an image on a pool thread."""
    lmm.engine.refuse = RustPanic("stride must be less than max_len")
    assert isinstance(ask(lmm).error, Internal)
    until(lambda: not lmm.table)
    lmm.engine.refuse = None
    ask(lmm)
    until(lambda: lmm.engine.requests)


@pytest.fixture
def unary() -> Iterator[UnarySetting]:
    created = UnarySetting()
    yield created
    created.close()


def test_the_response_of_lmm_is_relayed(unary: UnarySetting) -> None:
    unary.answers.append({})  # The empty final response is ignored.
    answer = unary.ask(**{ARRIVAL_INPUT: unary.stamps.make(42.5)}).answer
    assert (first(answer["text_output"]), first(answer["answer"])) == ("answer", "answer")
    assert unary.stamps.read(unary.calls[0][0]) == 42.5
    unary.answers.clear()
    assert isinstance(unary.ask().error, Internal), "`lmm` sent no response"


def test_the_inner_request_has_the_clients_id_if_that_is_long_enough(unary: UnarySetting) -> None:
    for client_id in ("0123456789abcdef", "7"):
        assert unary.ask(client_id).answer
    (_, long), (_, own) = unary.calls
    assert long == "0123456789abcdef"
    assert len(own) >= 16


def test_the_inner_request_is_cancelled_when_the_client_disconnects(unary: UnarySetting) -> None:
    unary.gate.clear()
    responder = FakeResponder(cancelled=True)
    unary.service.handle({"text_input": strings(["q"])}, {}, "", responder)
    assert responder.done.wait(30)
    (_, running), (cancel, cancelled) = unary.calls[:2]
    assert "cancel" in cancel
    assert cancelled == running


def test_an_id_that_others_may_have_cancels_nothing(unary: UnarySetting) -> None:
    unary.occupy()
    waiting = [unary.ask(client_id) for client_id in ("", "a" * 15)]
    for client_id in ("", "a" * 15):
        unary.cancel(client_id)
    assert not any(one.done.is_set() for one in waiting)


def test_the_inner_request_never_streams_and_has_the_clients_sampling_parameters() -> None:
    inner = inner_request({"text_input": strings(["q"])}, {"temperature": 0}, Limits())
    assert not inner["stream"][0]
    assert json.loads(first(inner["sampling_parameters"])) == {"temperature": 0}
    given = {"text_input": strings(["q"]), "sampling_parameters": strings(["{}"])}
    assert first(inner_request(given, {"temperature": 0}, Limits())["sampling_parameters"]) == "{}"


def test_metadata_of_an_ensemble_must_be_valid_utf8(unary: UnarySetting) -> None:
    layout = np.zeros((0, 6), np.int32)
    refused = unary.ask(metadata=strings([b"\xff"]), image_layout=layout)
    assert isinstance(refused.error, InvalidArgument)
    assert unary.calls == []


@pytest.fixture
def vision() -> Iterator[VisionSetting]:
    created = VisionSetting()
    yield created
    created.close()


def test_requests_are_answered_before_the_images_after_them_are_encoded(
    vision: VisionSetting,
) -> None:
    vision.encoder.images_per_batch = 2
    first = vision.occupy()
    rest = [vision.encode(*[PICTURE] * count) for count in (1, 3, 1)]
    vision.gate.set()
    assert [features_from(one.answer).count for one in (*first, *rest)] == [1, 1, 3, 1]
    assert vision.encoder.parts == [[1], [1, 1], [1, 1], [1]]


def test_requests_that_are_ready_together_share_a_part(vision: VisionSetting) -> None:
    vision.occupy()
    requests = [vision.encode(PICTURE) for _ in range(3)]
    vision.gate.set()
    for one in requests:
        assert features_from(one.answer).features.shape == (2, 3)
        assert one.answer["image_size"].tolist() == [[[4, 6]]]
    assert vision.flushed
    assert vision.encoder.parts == [[1], [1, 1, 1]]
    assert vision.encoder.groups == [1, 3]


def test_a_request_without_images_is_answered_while_the_encoder_is_busy(
    vision: VisionSetting,
) -> None:
    vision.occupy()
    answer = vision.ask().answer
    assert answer["image_features"].shape == (1, 0, 3)
    assert answer["image_layout"].shape == (1, 0, 6)
    assert answer["image_digest"].shape == (1, 0)
    assert vision.stamps.read({ARRIVAL_INPUT: answer[ARRIVAL_INPUT]}) > 0


def test_a_failing_tower_fails_the_requests_of_its_part(vision: VisionSetting) -> None:
    vision.encoder.error = MemoryError("out of memory at 0x1234")
    failure = vision.encode(PICTURE).error
    assert isinstance(failure, Internal)
    assert "0x1234" not in failure.message
    vision.encoder.error = None
    assert vision.encode(PICTURE).answer


def test_a_refused_request_leaves_nothing_in_the_queue(vision: VisionSetting) -> None:
    missing = vision.send({"image": strings([PICTURE])}).error
    assert "'text_input' is missing" in missing.message
    batch = Setting.send(vision, {"text_input": strings(["a", "b"])[:, None]}).error
    assert "send one request per prompt" in batch.message
    for _ in range(vision.full + 1):
        refused = vision.encode(PICTURE, lora_name=5).error
        assert "'lora_name' must be a string" in refused.message
    assert vision.encode(PICTURE).answer


@pytest.mark.parametrize("ending", ["late", "superseded", "cancelled"])
def test_a_request_that_ends_in_the_queue_is_neither_decoded_nor_encoded(
    vision: VisionSetting, ending: str
) -> None:
    terms: dict[str, Any] = {"late": {"deadline_ms": 50}, "superseded": {"stream_id": "camera"}}
    vision.occupy()
    ready = vision.encode(PICTURE, client_id="x" * 16, **terms.get(ending, {}))
    decoded = vision.decoder.decoded
    vision.decoder.holds = True
    not_decoded = vision.encode(PICTURE, client_id="x" * 16, **terms.get(ending, {}))
    supersedes = {"supersede": True, **terms["superseded"]} if ending == "superseded" else {}
    newest = vision.encode(PICTURE, PICTURE, client_id="y" * 16, **supersedes)
    if ending == "cancelled":
        vision.cancel("x" * 16)
    assert isinstance(ready.error, Cancelled)
    assert isinstance(not_decoded.error, Cancelled)
    assert vision.table.bytes == 5 * (48 + len(PICTURE)), "the decoder still has their bytes"
    vision.decoder.release()
    vision.gate.set()
    assert newest.answer
    assert vision.encoder.parts == [[1], [2]]
    assert vision.decoder.decoded == decoded + 1
    assert vision.table.bytes == 0


def test_an_answer_that_cannot_be_made_fails_only_its_request(
    vision: VisionSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = vision.occupy()
    second, third = (vision.encode(PICTURE) for _ in range(2))
    until(lambda: vision.decoder.decoded == 3)
    make, left = vision.stamps.make, iter((True, False))

    def fail_once(arrival: float) -> Any:
        if next(left, True):
            return make(arrival)
        raise MemoryError

    monkeypatch.setattr(vision.stamps, "make", fail_once)
    vision.gate.set()
    assert first.answer
    assert isinstance(second.error, Internal)
    assert third.answer


def test_a_panic_while_an_adapter_is_read_fails_only_its_request() -> None:
    def panic(name: str | None) -> VisionPart | None:
        if name is not None:
            raise RustPanic("index out of bounds")
        return None

    vision = VisionSetting(part_of=panic)
    try:
        assert isinstance(vision.encode(PICTURE, lora_name="a").error, Internal)
        assert vision.encode(PICTURE).answer
    finally:
        vision.close()


def test_a_request_waits_for_an_adapter_that_is_being_changed_but_not_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = []

    def part_of(name: str | None) -> VisionPart | None:
        tries.append(name)
        if name == "always" or tries.count(name) < 3:
            raise AdapterChanging("adapter 'a' is being changed; send the request again")
        return None

    vision = VisionSetting(part_of=part_of)
    try:
        assert vision.encode(PICTURE, lora_name="twice").answer
        monkeypatch.setattr("vlora.serving.vision_encoder.CHANGE_SECONDS", 0.0)
        assert isinstance(vision.encode(PICTURE, lora_name="always").error, AdapterChanging)
        assert vision.table.bytes == 0
    finally:
        vision.close()


def test_requests_are_answered_while_no_thread_can_be_started(
    vision: VisionSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    for _ in range(2):
        assert vision.encode(PICTURE).answer
