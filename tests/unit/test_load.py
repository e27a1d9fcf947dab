"""Tests of `vlora load`: drawn requests, the open loop on a fake server, figures and errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from tests.support.fakes import Clock
from vlora import paths
from vlora.cli import app
from vlora.errors import ADAPTER_CHANGED, SHUTTING_DOWN, InvalidArgument, ServerError
from vlora.load import figures
from vlora.load.contents import WORDS, Content, ContentMaker, TokenCount
from vlora.load.run import Asking, Measurement, Record, measure_tokens, send
from vlora.load.targets import Answer, OpenAiTarget, Question, RequestFailed, TritonTarget
from vlora.load.trace import AZURE, TracedRequest, Traffic, adapter_shares
from vlora.net import Tls, load_grpc_stubs

service_pb2, service_pb2_grpc = load_grpc_stubs()
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_a_seed_gives_the_same_requests_at_the_same_times() -> None:
    traffic = Traffic("bursty", 20.0, 10.0, adapters=3, zipf=1.0, priorities={5: 0.2})
    trace = traffic.draw(1)
    assert trace == traffic.draw(1) != traffic.draw(2)
    maker = ContentMaker(1, TokenCount(), images=1, frames=2, side=64)
    first, second = (maker.make(place, trace[0]) for place in (0, 1))
    assert first == maker.make(0, trace[0]) != second
    assert len({*first.images, *first.frames, *second.images, *second.frames}) == 6


def test_adapters_base_requests_and_priorities_have_their_shares() -> None:
    shares = adapter_shares(4, hot=0.35, zipf=1.0)
    assert shares == pytest.approx([0.35, 0.3, 0.2, 0.15])
    assert adapter_shares(2, zipf=1.0) == pytest.approx([2 / 3, 1 / 3])
    traffic = Traffic("uniform", 1e3, 4.0, adapters=4, hot=0.35, zipf=1.0, base_share=0.5)
    trace = replace(traffic, priorities={7: 0.1}).draw(0)
    found = [sum(one.adapter == adapter for one in trace) / 4000 for adapter in range(-1, 4)]
    assert found == pytest.approx([0.5, *(0.5 * share for share in shares)], abs=0.03)
    assert sum(one.priority == 7 for one in trace) / 4000 == pytest.approx(0.1, abs=0.02)
    assert trace[-1].at == pytest.approx(3.999)


def test_every_camera_sends_a_chunk_a_second_and_keeps_its_adapter() -> None:
    trace = Traffic(streams=4, seconds=3, adapters=8).draw(3)
    assert [one.at for one in trace[:5]] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [one.stream for one in trace] == [0, 1, 2, 3] * 3
    assert [one.adapter for one in trace[:4]] * 3 == [one.adapter for one in trace]


def test_a_chunk_names_its_adapter_and_its_camera_to_load_balancers() -> None:
    chunk = TracedRequest(0.0, 0, 1, 1, 1, stream=3)
    for prefix, header in (("load-0", "a%2Fb/load-0-3"), (None, "a%2Fb")):
        question = Asking(("a/b",), stream_prefix=prefix).question(chunk, Content("x"))
        assert question.headers == (("x-lora-adapter", header),)


@pytest.mark.parametrize(
    "rows",
    [
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.6805900,396,109\n",
        "2024-05-10 00:00:00.009930+00:00,374,44\r\n2024-05-10 00:00:04.009930+00:00,396,109\r\n",
    ],
)
def test_the_requests_of_azures_files_are_stretched_to_the_rate(tmp_path: Path, rows: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(HEAD + rows)
    trace = Traffic(str(file), rate=0.5, seconds=4.0, lengths=(None, None), context=200).draw(0)
    assert trace == [
        TracedRequest(0.0, -1, 156, 44, 44),
        TracedRequest(2.0, -1, 100, 100, 100),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a,b\n1,2\n", "begins with the columns 'a,b'"),
        (HEAD + "today,1,2\n", "line 2 of"),
        (HEAD + "2023-11-16 18:15:46,3,4\n", "has 1 requests, but --rate times --seconds are 2"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str | None, reason: str) -> None:
    file = tmp_path / "trace.csv"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InvalidArgument, match=reason):
        Traffic(str(file), rate=1.0, seconds=2.0).draw(0)


@pytest.mark.parametrize("name", AZURE)
def test_a_synthetic_trace_has_the_statistics_of_azures(name: str) -> None:
    trace = Traffic(name, 10.0, 1000.0, lengths=(None, None)).draw(1)
    prompts, outputs, _ = AZURE[name]
    assert trace[-1].at == pytest.approx(1000, rel=0.15)
    for values, spread in (
        (sorted(one.prompt for one in trace), prompts),
        (sorted(one.output for one in trace), outputs),
    ):
        assert values[5000] == pytest.approx(spread.median, rel=0.06)
        assert sum(values) / 1e4 == pytest.approx(spread.mean, rel=0.08)
        assert values[-1] <= spread.most


class Server:
    """Answers after some seconds with two tokens, or with an error to texts that say so."""

    def __init__(self, seconds: float, per_word: int = 1) -> None:
        self._seconds = seconds
        self._per_word = per_word
        self.asked: list[Question] = []

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def ask(self, question: Question, answer: Answer) -> None:
        self.asked.append(question)
        await asyncio.sleep(self._seconds)
        if question.content.text == "bad":
            raise RequestFailed("INVALID_ARG", "a bad text")
        answer.arrive()
        await asyncio.sleep(self._seconds)
        answer.prompt_tokens = 5 + self._per_word * len(question.content.text.split())
        answer.output_tokens = 2


def test_requests_are_sent_at_their_times_and_measured_from_them() -> None:
    trace = [TracedRequest(0.05 * place, place % 2 - 1, 1, 2, 2) for place in range(4)]
    asking = Asking(["a"], timeout=60.0)
    measurement = Measurement.of(trace, asking.adapters)
    server = Server(0.1)
    contents = [Content(text) for text in ("good", "bad", "good", "good")]
    asyncio.run(send(server, asking, trace, contents, measurement))
    assert [one.error for one in measurement.records] == ["", "INVALID_ARG", "", ""]
    assert measurement.messages == {"INVALID_ARG": "a bad text"}
    assert [question.adapter for question in server.asked] == [None, "a", None, "a"]
    for one in measurement.records[2:]:
        assert one.lag is not None
        assert one.first is not None
        assert one.end is not None
        assert 0 <= one.lag <= one.first - 0.1 <= one.end - 0.2
    measurement = Measurement.of(trace[:1], ["a"])
    asking = Asking(["a"], timeout=0.1)
    asyncio.run(send(Server(60.0), asking, trace[:1], contents[:1], measurement))
    assert measurement.records[0].error == "TIMEOUT"


def test_a_timer_that_is_late_does_not_delay_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep, late, clock = asyncio.sleep, 0.0015, Clock(0.0)

    async def late_sleep(seconds: float) -> None:
        await sleep(0)
        clock.now += max(0.0, seconds + late) if seconds else 1e-5

    monkeypatch.setattr(asyncio, "sleep", late_sleep)
    monkeypatch.setattr(time, "perf_counter", clock)
    trace = [TracedRequest(0.01 * place, -1, 1, 2, 2) for place in range(20)]
    measurement = Measurement.of(trace, ())
    asyncio.run(send(Server(0.0), Asking(), trace, [Content("good")] * 20, measurement))
    assert all(one.lag is not None and one.lag < late for one in measurement.records)


def test_requests_that_run_when_the_load_is_stopped_did_not_end() -> None:
    trace = [TracedRequest(at, -1, 1, 2, 2) for at in (0.0, 60.0)]
    measurement = Measurement.of(trace, ())

    async def stopped() -> None:
        server = Server(60.0)
        contents = [Content("good")] * 2
        sending = asyncio.create_task(send(server, Asking(), trace, contents, measurement))
        while not server.asked:
            await asyncio.sleep(0.01)
        sending.cancel()
        await sending

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(stopped())
    found = figures.summarize(measurement.records)
    assert (found["sent"], found["unfinished"], found["answered"], found["errors"]) == (1, 1, 0, {})


def test_a_text_has_the_wanted_number_of_tokens_as_the_server_counts_them() -> None:
    count = asyncio.run(measure_tokens(Server(0.0, per_word=2), Asking()))
    assert (count.fixed, count.per_word) == (5, 2)
    text = ContentMaker(0, count).make(0, TracedRequest(0.0, -1, 105, 1, 1)).text
    assert len(text.split()) == 50
    tokenizer = AutoTokenizer.from_pretrained(paths.root() / "tools" / "demo" / "checkpoint")
    assert [word for word in WORDS if len(tokenizer.tokenize(f" {word}")) != 1] == []


def test_figures_count_from_the_scheduled_times_and_errors_miss_their_deadlines() -> None:
    def record(adapter: str, at: float, **more: Any) -> Record:
        return Record(adapter, at, **({"lag": 0.0, "error": ""} | more))

    records = [
        record("a", 0.0, first=0.5, end=1.0, output_tokens=4, prompt_tokens=10),
        record("a", 1.0, first=1.0, end=3.0, output_tokens=6, prompt_tokens=20, lag=0.2),
        record("", 2.0, end=0.5, error="UNAVAILABLE"),
        Record("", 3.0),
    ]
    found = figures.summarize(records, deadline=2.0)
    assert (found["requests"], found["sent"], found["answered"]) == (4, 3, 2)
    assert found["errors"] == {"UNAVAILABLE": 1}
    assert found["seconds"] == 4.0
    assert found["token_latency_s"] == 4.0 / 10
    assert found["first_token_s"]["mean"] == 0.75
    assert found["end_to_end_s"]["max"] == 3.0
    assert (found["requests_per_s"], found["tokens_per_s"]) == (0.5, 2.5)
    assert (found["deadlines_met"], found["goodput_per_s"]) == (pytest.approx(1 / 3), 0.25)
    assert not figures.kept_schedule(found)
    assert list(figures.by_adapter(records)) == ["a", ""]
    assert figures.by_adapter(records)["a"]["errors"] == {}


class Described(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Has every model, with the input that a load needs."""

    def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        text = service_pb2.ModelMetadataResponse.TensorMetadata(name="text_input")
        return service_pb2.ModelMetadataResponse(name=request.name, inputs=[text])

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ModelInferResponse(id="first")

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        """Refuse the first stream as a server does that hands over, the second since its adapter
        was changed, and answer all others.
        """
        message, refusals = service_pb2.ModelStreamInferResponse(), (SHUTTING_DOWN, ADAPTER_CHANGED)
        if (stream := next(self._streams)) < len(refusals):
            message.error_message = f"UNAVAILABLE: {refusals[stream]}"
        yield from (message for _ in requests)

    def __init__(self) -> None:
        self._streams = count()


class Hostile(Described):
    """Answers each request with one output: the given bytes, said to be strings."""

    def __init__(self, output: bytes) -> None:
        self._output = output

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        message = service_pb2.ModelStreamInferResponse()
        message.infer_response.outputs.add(name="text_output", datatype="BYTES")
        message.infer_response.raw_output_contents.append(self._output)
        yield from (message for _ in requests)


@asynccontextmanager
async def opened(target: Any) -> AsyncIterator[Any]:
    try:
        await target.open()
        yield target
    finally:
        await target.close()


@contextmanager
def described(
    credentials: grpc.ServerCredentials | None = None, servicer: Described | None = None
) -> Iterator[str]:
    """Yield the address of a server, with TLS if it has credentials."""
    server = grpc.server(ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer or Described(), server)
    at = "127.0.0.1:0"
    port = server.add_secure_port(at, credentials) if credentials else server.add_insecure_port(at)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def test_a_server_with_tls_is_measured_by_the_name_in_its_certificate(
    key_and_certificate: tuple[Path, Path],
) -> None:
    key, ca = key_and_certificate

    async def connect(address: str, tls: Tls | None) -> None:
        async with opened(TritonTarget(address, "lmm", tls)):
            pass

    pair = (key.read_bytes(), ca.read_bytes())
    with described(grpc.ssl_server_credentials([pair])) as address:
        asyncio.run(connect(address, Tls(ca, "vlora")))
        with pytest.raises(ServerError, match="no server answers"):
            asyncio.run(connect(address, None))


def test_the_answer_of_another_request_is_an_error() -> None:
    async def ask(address: str) -> None:
        async with opened(TritonTarget(address, "lmm_unary", unary=True)) as target:
            await target.ask(Question(Content("a"), None, id="first"), Answer())
            with pytest.raises(RequestFailed, match="request 'first'"):
                await target.ask(Question(Content("a"), None, id="second"), Answer())

    with described() as address:
        asyncio.run(ask(address))


def test_a_stream_that_a_server_has_not_begun_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vlora.errors.CHANGE_PAUSE_SECONDS", 0.01)

    async def ask(address: str) -> None:
        async with opened(TritonTarget(address, "lmm")) as target:
            await target.ask(Question(Content("a"), None), Answer())

    with described() as address:
        asyncio.run(ask(address))


@pytest.mark.parametrize(
    ("output", "code"),
    [(b"\1\0\0\0\xff", "BAD_ANSWER"), (bytes(200_000), "RESOURCE_EXHAUSTED")],
    ids=["not UTF-8", "too large"],
)
def test_an_answer_that_cannot_be_read_is_an_error(
    monkeypatch: pytest.MonkeyPatch, output: bytes, code: str
) -> None:
    monkeypatch.setattr("vlora.load.targets.MAX_ANSWER_BYTES", 100_000)

    async def ask(address: str) -> None:
        async with opened(TritonTarget(address, "lmm")) as target:
            with pytest.raises(RequestFailed) as caught:
                await target.ask(Question(Content("a"), None), Answer())
            assert caught.value.code == code

    with described(servicer=Hostile(output)) as address:
        asyncio.run(ask(address))


OK = b"HTTP/1.1 200 OK\r\n\r\n"
EVENT = b'data: {"choices": [{"delta": {"content": "%b"}}]}\n'
HOSTILE = {
    "an endless line": (OK, b"x" * 4096, "BAD_ANSWER"),
    "endless lines": (OK, b": a comment\n" * 400, "TIMEOUT"),
    "an endless text": (OK, EVENT % (b"x" * 4096), "BAD_ANSWER"),
    "an event of deep lists": (OK + b"data: " + b"[" * 50_000, b"\n", "BAD_ANSWER"),
    "text as a number of tokens": (
        OK + b'data: {"usage": {"prompt_tokens": 1, "completion_tokens": "2"}}',
        b"\n",
        "BAD_ANSWER",
    ),
    "a huge number of tokens": (
        OK + b'data: {"usage": {"prompt_tokens": 1, "completion_tokens": 1%b}}' % (b"0" * 400),
        b"\n",
        "BAD_ANSWER",
    ),
    "an endless error": (b"HTTP/1.1 500 Oh\r\n\r\n", b"x" * 4096, "HTTP_500"),
    "a long code": (
        OK + b'data: {"error": {"code": "%b"}}' % (b"x" * 4096),
        b"\n",
        "ERROR",
    ),
    "endless headers": (b"HTTP/1.1 200 OK\r\n", b"name: value\r\n" * 300, "CONNECTION"),
    "nothing": (b"", b"", "TIMEOUT"),
}


@pytest.mark.parametrize(("start", "repeated", "code"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_server_ends_only_its_requests(
    monkeypatch: pytest.MonkeyPatch, start: bytes, repeated: bytes, code: str
) -> None:
    pytest.importorskip("httpcore2", reason="the extra `gateway` is not installed")
    monkeypatch.setattr("vlora.load.targets.MAX_ANSWER_BYTES", 200_000)
    trace = [TracedRequest(0.0, -1, 1, 2, 2)] * 2
    measurement = Measurement.of(trace, ())
    asking = Asking(timeout=0.5 if code == "TIMEOUT" else 60.0)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(ConnectionError):
            writer.write(start)
            while not writer.is_closing():
                writer.write(repeated)
                await writer.drain()
                await asyncio.sleep(0 if repeated else 0.01)

    async def measure() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with opened(OpenAiTarget(f"http://127.0.0.1:{port}/v1", "base")) as target:
                await send(target, asking, trace, [Content("good")] * 2, measurement)

    asyncio.run(measure())
    assert [one.error for one in measurement.records] == [code] * 2
    assert figures.summarize(measurement.records)["errors"] == {code: 2}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--arrivals", "steady"], "unknown --arrivals 'steady'; choose poisson"),
        (["--priority", "high"], "--priority takes PRIORITY=SHARE, as in 5=0.1, not 'high'"),
        (["--priority", "1=0.7", "--priority", "2=0.7"], "their sum 1 at most"),
        (["--adapters", "@none.txt"], "none.txt"),
        (["--zipf", "1"], "--hot, --zipf and --base-share need --adapters NAMES"),
        (["--send-deadline"], "--send-deadline needs --deadline-ms MS"),
        (["--tls-name", "a"], "--tls-name, --tls-key and --tls-certificate need --tls-ca FILE"),
        (["--tls-ca", "none.crt"], "none.crt cannot be read; the options --tls-… name PEM files"),
        (["--grpc", "here"], "--grpc takes HOST:PORT, as in 127.0.0.1:8001, not 'here'"),
        (["--openai", "here"], "--openai takes a URL, as in http://127.0.0.1:8080/v1, not 'here'"),
        (["--json", "none/a.json"], "none/a.json cannot be written"),
        (["--grpc", "127.0.0.1:1"], "no server answers at 127.0.0.1:1"),
    ],
)
def test_an_error_says_what_was_wrong_and_what_would_be_right(
    arguments: list[str], reason: str
) -> None:
    done = CliRunner().invoke(app, ["load", *arguments])
    assert done.exit_code == 1
    assert reason in done.output
