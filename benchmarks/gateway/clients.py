"""Clients with little overhead, for the gateway and for gRPC.

Both run in one event loop, and requests are prepared before any is sent. A request is timed from
just before it is sent until its first token, and until its end.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.engine.load import LoadTimes, sampling
from vlora.gateway.backend import Backend, Question

TEXT = b'"content": "'
NO_TEXT = b'"content": ""'
END = b"data: [DONE]"
SEPARATOR = b"\r\n"


@dataclass(frozen=True)
class Ask:
    """One request.

    image: an encoded file, or None.
    adapter: name of the adapter, or None.
    """

    text: str
    image: bytes | None
    adapter: str | None
    task: str
    max_tokens: int

    def question(self, id: str) -> Question:
        """Return the request as the gateway sends it over gRPC."""
        images = () if self.image is None else (self.image,)
        keys = sampling(self.adapter, self.max_tokens)
        return Question(id, self.text, self.task, images, (), keys, stream=True)

    def http(self, host: str, each_token: bool = False) -> bytes:
        """Return the request as the bytes of an HTTP request.

        each_token: whether each token is sent in a chunk of its own.
        """
        content: list[dict[str, Any]] = [{"type": "text", "text": self.text}]
        if self.image is not None:
            url = f"data:image/png;base64,{base64.b64encode(self.image).decode()}"
            content.insert(0, {"type": "image_url", "image_url": {"url": url}})
        body = json.dumps(
            {
                "model": self.adapter or "base",
                "messages": [{"role": "user", "content": content}],
                "task": self.task,
                "max_tokens": self.max_tokens,
                "ignore_eos": True,
                "stream": True,
                **({"stream_interval_ms": 0} if each_token else {}),
            }
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class BenchmarkError(Exception):
    """Raised when a request of the benchmark fails."""


class Connection:
    """One HTTP connection to the gateway, which is kept open between requests."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Open the connection to the gateway."""
        self._reader, self._writer = await asyncio.open_connection(self.host, self.port)

    def close(self) -> None:
        """Close the connection immediately, even in the middle of an answer."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def send(self, request: bytes) -> None:
        """Send a request."""
        assert self._writer is not None
        self._writer.write(request)
        await self._writer.drain()

    async def head(self) -> bytes:
        """Return the head of the answer, which arrives with the first token.

        Raise BenchmarkError if the request failed.
        """
        assert self._reader is not None
        head = await self._reader.readuntil(2 * SEPARATOR)
        if not head.startswith(b"HTTP/1.1 200"):
            raise BenchmarkError(f"the gateway answered {head!r}")
        return head

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the parts of the answer's body as they arrive.

        Raise BenchmarkError if the request failed.
        """
        head = await self.head()
        assert self._reader is not None
        lines = head.lower().split(SEPARATOR)
        lengths = [line.partition(b":")[2] for line in lines if line.startswith(b"content-length")]
        if lengths:
            yield await self._reader.readexactly(int(lengths[0]))
            return
        while size := int(await self._reader.readuntil(SEPARATOR), 16):
            part = await self._reader.readexactly(size + len(SEPARATOR))
            yield part[: -len(SEPARATOR)]
        await self._reader.readuntil(SEPARATOR)

    async def get(self, path: str) -> bytes:
        """Send a GET request and return the body of its answer."""
        await self.send(f"GET {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n\r\n".encode())
        return b"".join([part async for part in self.body()])


class Clients:
    """Clients that send requests through the gateway or over gRPC, on one event loop."""

    def __init__(self, grpc: str, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._backend = Backend(grpc, answer_seconds=600.0)
        self._connections: list[Connection] = []
        self._asked = 0

    async def close(self) -> None:
        """Close all connections."""
        for connection in self._connections:
            connection.close()
        await self._backend.close()

    async def over_grpc(self, asks: Sequence[Ask]) -> LoadTimes:
        """Send all requests at once, each on its own stream, and return their times."""
        started = time.perf_counter()
        return _times(started, await asyncio.gather(*map(self._question, asks)))

    async def over_gateway(self, asks: Sequence[Ask], each_token: bool = False) -> LoadTimes:
        """Send all requests at once, each on its own connection, and return their times."""
        while len(self._connections) < len(asks):
            self._connections.append(Connection(self.host, self.port))
            await self._connections[-1].open()
        prepared = [ask.http(f"{self.host}:{self.port}", each_token) for ask in asks]
        started = time.perf_counter()
        pairs = zip(self._connections, prepared, strict=False)
        return _times(started, await asyncio.gather(*(_chat(*pair) for pair in pairs)))

    async def _question(self, ask: Ask) -> tuple[float, float]:
        self._asked += 1
        first, tokens = 0.0, 0
        async for piece in self._backend.ask(ask.question(f"benchmark-{self._asked:016}")):
            if piece.text:
                first = first or time.perf_counter()
            tokens += piece.num_output_tokens
        if tokens != ask.max_tokens:
            raise BenchmarkError(f"the answer has {tokens} tokens instead of {ask.max_tokens}")
        end = time.perf_counter()
        return first or end, end


async def _chat(connection: Connection, request: bytes) -> tuple[float, float]:
    await connection.send(request)
    first, ended = 0.0, False
    async for part in connection.body():
        if not first and part.count(TEXT) > part.count(NO_TEXT):
            first = time.perf_counter()
        ended = ended or END in part
    if not ended:
        raise BenchmarkError("the stream ended before its answer")
    end = time.perf_counter()
    return first or end, end


def _times(started: float, moments: Sequence[tuple[float, float]]) -> LoadTimes:
    firsts, ends = zip(*moments, strict=True)
    return LoadTimes([one - started for one in firsts], [one - started for one in ends])
