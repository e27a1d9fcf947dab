"""Adapters that change while they are served, and clients that know the right answers: a soak."""

from __future__ import annotations

import asyncio
import io
import json
import random
import shutil
import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import grpc.aio

from tests.support.make_adapters import AdapterSpec, make_adapters
from tests.support.many_adapters import replace_weights
from tests.support.replicas import Serving
from tests.support.triton_client import picture
from vlora.errors import ServerError, from_message, is_coded
from vlora.load.contents import Content
from vlora.load.run import Asking
from vlora.load.targets import Answer, Question, RequestFailed, TritonTarget, service_pb2
from vlora.load.targets import service_pb2_grpc as grpc_stubs
from vlora.load.trace import TracedRequest, Traffic

ADAPTERS = tuple(f"adapter-{number:02}" for number in range(64))
CHANGING, REMOVED = ADAPTERS[:16], ADAPTERS[16:20]
SECOND_SEED = 1000  # Added to the seed of an adapter's first version.
PROMPTS = ("what is the number?", "where are they?", "what is red here?", "what is in it?")
PICTURED = 3  # Place of the prompt with a picture.
TOKENS, LONG_TOKENS = 8, 100
SHARES = {"cancel": 0.05, "cancel by id": 0.05, "bad": 0.05, "vanish": 0.02, "slow": 0.02}
SHARES |= {"unary": 0.4, "stream": 0.41}
STOPPED = ("cancel", "cancel by id", "vanish")
# Time from a change in an adapter's folder to its use: a second without a change, the pause between
# two scans and the loading, on a busy machine.
SEEN_SECONDS = 10.0
# Words of Triton's own error about a model, which has no code within a stream.
UNHEALTHY = "is not healthy"


@dataclass(frozen=True)
class Planned(Content):
    """Content of a request, with its place in the run, and what its client does."""

    place: int = 0
    kind: str = "unary"
    prompt: int = 0
    patience: float = 0.0  # Seconds to a cancellation.


class Adapters:
    """The folder of adapters, which a thread changes until `stop`."""

    def __init__(self, checkpoint: Path, root: Path, seed: int) -> None:
        self.root = root
        self._away = root.with_name("away")
        self._rng = random.Random(seed)
        self._versions = dict.fromkeys(ADAPTERS, 0)
        self.changes: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self.removals: list[tuple[str, float, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._change)
        first = AdapterSpec(ADAPTERS[0], rank=4, targets=("q_proj", "v_proj"))
        make_adapters(checkpoint, root, (first,))
        for number, name in enumerate((*ADAPTERS[1:], *map(second, CHANGING))):
            shutil.copytree(root / ADAPTERS[0], root / name)
            is_second = number >= len(ADAPTERS) - 1
            own = number + 1 - len(ADAPTERS) + SECOND_SEED if is_second else number + 1
            replace_weights(root / name, own)
        replace_weights(root / ADAPTERS[0], 0)

    def begin(self) -> None:
        """Remove the folders that are served only for reference answers, and begin to change."""
        for name in CHANGING:
            shutil.rmtree(self.root / second(name))
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _change(self) -> None:
        while not self._ended.wait(1.0):
            if self._rng.random() < 0.2:
                name, begun = self._rng.choice(REMOVED), time.perf_counter()
                (self.root / name).rename(self._away)
                self._ended.wait(4.0)
                self._away.rename(self.root / name)
                self.removals.append((name, begun, time.perf_counter() + SEEN_SECONDS))
            else:
                name = self._rng.choice(CHANGING)
                version = self._versions[name] = 1 - self._versions[name]
                replace_weights(self.root / name, int(name[-2:]) + SECOND_SEED * version)
                self.changes[name].append((time.perf_counter(), version))

    def versions(self, name: str, span: tuple[float, float]) -> set[int]:
        """Return the versions of an adapter that a request of this time may have used."""
        found, current = set(), 0
        for at, version in self.changes[name]:
            if at + SEEN_SECONDS < span[0]:
                current = version
            elif at <= span[1]:
                found.add(version)
        return found | {current}


def second(name: str) -> str:
    return f"second-{name}"


class Clients:
    """The clients of a run, as a target of `vlora.load`. Each request is one client's.

    spans: begin and end of each request that has ended. references: answers by adapter and prompt.
    """

    def __init__(self, serving: Serving, adapters: Adapters, seed: int) -> None:
        self._address, self._http = serving.address("gRPC"), serving.address("HTTP")
        self._adapters, self._seed = adapters, seed
        self._streams = TritonTarget(self._address, "lmm")
        self._calls = TritonTarget(self._address, "lmm_unary", unary=True)
        self.references: dict[tuple[str, int], str] = {}
        self.spans: dict[int, tuple[float, float]] = {}
        self._kinds = {"unary": self._unary, "stream": self._stream, "bad": self._bad}
        self._kinds |= {"cancel": self._cancel, "cancel by id": self._cancel_by_id}
        self._kinds |= {"vanish": self._vanish, "slow": self._slow}

    async def open(self) -> None:
        self._channel = grpc.aio.insecure_channel(self._address)
        await self._streams.open()
        await self._calls.open()

    async def close(self) -> None:
        for one in (self._channel, self._streams, self._calls):
            await one.close()

    async def learn(self, asking: Asking) -> None:
        """Get the answers to compare with: each question, with each version of its adapter."""
        await self.open()
        few = asyncio.Semaphore(8)

        async def ask(name: str, prompt: int) -> None:
            content, answer = contents_of(prompt), Answer()
            traced = TracedRequest(0.0, -1, 1, TOKENS, TOKENS)
            question = replace(asking.question(traced, content), adapter=name or None)
            async with few:
                await self._calls.ask(question, answer)
            self.references[name, prompt] = answer.text

        names = ("", *ADAPTERS, *map(second, CHANGING))
        await asyncio.gather(*(ask(name, one) for name in names for one in range(len(PROMPTS))))
        await self.close()

    async def ask(self, question: Question, answer: Answer) -> None:
        planned, begun = question.content, time.perf_counter()
        assert isinstance(planned, Planned)
        question = replace(question, id=f"soak-{self._seed}-{planned.place:016}")
        try:
            await self._kinds[planned.kind](question, answer, planned)
            if planned.kind in ("unary", "stream", "slow"):
                self._check(question, answer, planned, (begun, time.perf_counter()))
        except RequestFailed as error:
            code = "INTERNAL" if UNHEALTHY in str(error) else error.code
            raise RequestFailed(code, str(error)) from None
        except Exception as error:
            if isinstance(error, TimeoutError):
                raise
            raise RequestFailed("CLIENT", repr(error)) from error
        finally:
            assert planned.place not in self.spans, "a request is sent once"
            self.spans[planned.place] = (begun, time.perf_counter())

    def _check(
        self, question: Question, answer: Answer, planned: Planned, span: tuple[float, float]
    ) -> None:
        """Raise RequestFailed if an answer is not that of its prompt and adapter."""
        name = question.adapter or ""
        names = [second(name) if one else name for one in self._adapters.versions(name, span)]
        if answer.text in [self.references[one, planned.prompt] for one in names]:
            return
        others = [key for key, text in self.references.items() if text == answer.text]
        raise RequestFailed("WRONG", f"{name}, {planned.prompt}: {answer.text!r} of {others}")

    async def _unary(self, question: Question, answer: Answer, planned: Planned) -> None:
        await self._calls.ask(question, answer)

    async def _stream(self, question: Question, answer: Answer, planned: Planned) -> None:
        await self._streams.ask(question, answer)

    async def _bad(self, question: Question, answer: Answer, planned: Planned) -> None:
        bad = (
            replace(question, adapter="no-such-adapter"),
            replace(question, sampling={**question.sampling, "top_p": 7}),
            replace(question, task="no-such-task"),
            replace(question, content=replace(question.content, images=(b"no picture",))),
        )
        await self._streams.ask(bad[planned.place % len(bad)], answer)
        raise RequestFailed("ACCEPTED", f"a bad request, {planned.place % len(bad)}")

    async def _cancel(self, question: Question, answer: Answer, planned: Planned) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(planned.patience):
                return await self._stream(question, answer, planned)
        raise RequestFailed("CANCELLED", "by the client")

    async def _cancel_by_id(self, question: Question, answer: Answer, planned: Planned) -> None:
        asked = asyncio.create_task(self._stream(question, answer, planned))
        await asyncio.wait([asked], timeout=planned.patience)
        request = service_pb2.ModelInferRequest(model_name="lmm", id=question.id)
        request.inputs.add(name="cancel", datatype="BOOL", shape=[1])
        request.raw_input_contents.append(b"\1")
        with suppress(grpc.aio.AioRpcError):  # Its server may have ended; the request counts.
            stub = grpc_stubs.GRPCInferenceServiceStub(self._channel)
            async for _ in stub.ModelStreamInfer(iter([request])):
                pass
        await asked

    async def _vanish(self, question: Question, answer: Answer, planned: Planned) -> None:
        own = TritonTarget(self._address, "lmm")
        try:
            await own.open()
            async with asyncio.timeout(planned.patience):
                await own.ask(question, answer)
        except ServerError as error:
            raise RequestFailed("UNAVAILABLE", str(error)) from None
        except TimeoutError:
            raise RequestFailed("CANCELLED", "by the client") from None
        finally:
            await own.close()

    async def _slow(self, question: Question, answer: Answer, planned: Planned) -> None:
        """Send an HTTP request in pieces, and read its answer late."""
        host, port = self._http.rsplit(":", 1)
        sampling = {**question.sampling, "lora_name": question.adapter}
        sampling = {key: value for key, value in sampling.items() if value is not None}
        values = {"text_input": question.content.text, "sampling_parameters": json.dumps(sampling)}
        body = json.dumps(values | {"exclude_input_in_output": True}).encode()
        head = f"POST /v2/models/lmm_unary/generate HTTP/1.1\r\nhost: {host}\r\n"
        head += f"connection: close\r\ncontent-length: {len(body)}\r\n"
        head += f"x-lora-adapter: {question.adapter or ''}\r\n\r\n"
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            data = head.encode() + body
            for start in range(0, len(data), 100):
                writer.write(data[start : start + 100])
                await asyncio.sleep(0.1)
            await asyncio.sleep(0.5)
            answered = await reader.read()
        except ConnectionError as error:
            raise RequestFailed("CUT", str(error)) from None
        finally:
            writer.close()
        answer.text = text_of(answered)


class _Received:
    """Received bytes, with the method of a socket that `HTTPResponse` reads from."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def text_of(data: bytes) -> str:
    """Return the text in an HTTP answer. Raises RequestFailed."""
    response = HTTPResponse(_Received(data))  # type: ignore[arg-type]
    try:
        response.begin()
        body = response.read().decode()
    except HTTPException as error:
        raise RequestFailed("CUT", repr(error)) from None
    if response.status == 200:
        return str(json.loads(body)["text_output"])
    # Envoy's own answers have the status 503 and no code.
    own = "UNAVAILABLE" if response.status == 503 else "ERROR"
    raise RequestFailed(from_message(body).code if is_coded(body) else own, body)


def contents_of(prompt: int) -> Planned:
    images = (picture((200, 30, 30)),) if prompt == PICTURED else ()
    return Planned(PROMPTS[prompt], images, prompt=prompt)


def plan(seed: int, requests: int, rate: float) -> tuple[list[TracedRequest], list[Planned]]:
    """Return the times and adapters of the requests, and what their clients do."""
    popularity: dict[str, Any] = {"adapters": len(ADAPTERS), "zipf": 0.5, "base_share": 0.05}
    lengths = (16, TOKENS)
    trace = Traffic("poisson", rate, requests / rate, lengths, **popularity).draw(seed)
    rng = random.Random(seed)
    prompts, planned = [contents_of(one) for one in range(len(PROMPTS))], []
    for place, traced in enumerate(trace):
        (kind,) = rng.choices([*SHARES], [*SHARES.values()])
        prompt = prompts[rng.randrange(PICTURED if kind == "slow" else len(PROMPTS))]
        planned.append(replace(prompt, place=place, kind=kind, patience=rng.uniform(0.01, 0.3)))
        if kind in STOPPED:
            trace[place] = replace(traced, output=LONG_TOKENS, limit=LONG_TOKENS)
    return trace, planned
